"""The demo: a tiny policy, and a task that the policy solves only some of the time."""
