"""Sessions: one rollout from its sandbox to its verdict, its model calls, and the node that hosts it."""
