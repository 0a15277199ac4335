"""Certifies that a harness works with this build. A scripted model makes the harness carry out small tasks, and the
records of these sessions are checked. `task_check.py` checks tasks by means of their known solutions."""
