"""Nodes in other processes than the service's: how they are started, and what the two ends tell each other.

What a node does with an attempt is in `sessions/`; how its engine pool follows the service's is in `engines/pool/`.
"""
