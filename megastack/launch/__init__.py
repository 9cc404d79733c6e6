"""Starting the ranks of a run and turning their ends into one exit code."""
