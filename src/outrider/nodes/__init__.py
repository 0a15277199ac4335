"""Nodes outside the service's process: how they start or join, and the messages between the two ends.

`sessions/` runs a node's attempts; `engines/pool/` keeps a node's engine pool like the service's.
"""
