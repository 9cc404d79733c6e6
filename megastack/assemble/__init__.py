"""The composition root: from a configuration and a mesh to a run that is ready to go.

Only here do configuration, mesh, model and parallel code meet. It decides nothing about mathematics; it hands each part
its plain arguments.
"""
