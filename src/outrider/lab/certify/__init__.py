"""Certifies one harness against this build: a scripted model makes the harness carry out small tasks, and the records
of the sessions are checked. `task_check.py` checks tasks with their known solutions."""
