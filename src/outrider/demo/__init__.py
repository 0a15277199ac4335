"""The demo: a tiny policy and the task it half knows."""
