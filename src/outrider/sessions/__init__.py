"""Sessions: one rollout from its sandbox to its verdict, its model calls (`calls/`), and the hosting node.

`sandbox/` and `sandbox/runtimes/` make sandboxes; `service/` decides when a session runs.
"""
