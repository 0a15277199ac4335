"""Nodes outside the service's process: how they start or join the service, and their messages to and from it.

`sessions/` runs the attempts on a node. A node's engine pools copy the state of the service's engine pools
(`engines/pool/follower.py`).
"""
