"""The composition root: builds a run from a configuration and a mesh.

Only this package sees configuration, mesh, model and parallel code together. It contains no mathematics; it passes each
part its plain arguments.
"""
