"""Runs sessions: the rollout of each attempt, its model calls (`calls/`), and the node that hosts sessions.

`sandbox/` and `sandbox/runtimes/` make sandboxes; `service/` decides when a session runs.
"""
