"""Runs sessions. The package has the rollout of one attempt, its model calls (`calls/`), and the node that hosts
sessions.

`sandbox/` and `sandbox/runtimes/` start sandboxes. `service/` decides when a session runs.
"""
