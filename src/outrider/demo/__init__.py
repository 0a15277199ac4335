"""The demo: a tiny policy, and a task at which it is right some of the time."""
