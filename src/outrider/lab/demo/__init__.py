"""The demo: a tiny policy model, and a task that it solves only some of the time."""
