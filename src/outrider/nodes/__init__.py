"""Nodes outside the service's process: how such nodes start or join, and their messages to and from the service.

`sessions/` runs a node's attempts. A node's engine pools copy the state of the service's pools
(`engines/pool/follower.py`).
"""
