"""Starting the ranks of a run, and turning their exits into one result."""
