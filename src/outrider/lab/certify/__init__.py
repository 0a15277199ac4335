"""Certifies one harness against this build: a scripted model makes the harness do small tasks, and the results are
judged. `task_check.py` checks tasks with their known solutions."""
