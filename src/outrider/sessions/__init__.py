"""Sessions: one rollout from its sandbox to its verdict, its model calls (`calls/`), and the node that hosts it.

What a sandbox is made of lives in `sandboxes/` and `runtimes/`; which session runs when is decided in `service/`.
"""
