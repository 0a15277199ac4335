"""The demo: a tiny policy, and a task that the policy solves some of the time."""
