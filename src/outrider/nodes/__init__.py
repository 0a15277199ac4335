"""Nodes outside the service's process: how they start or join, and the messages between the two ends.

`sessions/` runs a node's attempts. A node's engine pool follows the service's pool (`engines/pool/follower.py`).
"""
