"""The composition root: builds a run from a configuration and a mesh.

Only this package imports configuration, mesh, model and parallel code together. It contains no mathematics; it passes
plain arguments to each part.
"""
