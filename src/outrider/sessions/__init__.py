"""Runs sessions. Contains the rollout of one attempt, its model calls (`calls/`), and the node that hosts sessions.

`sandbox/` starts sandboxes. `service/` decides when a session runs.
"""
