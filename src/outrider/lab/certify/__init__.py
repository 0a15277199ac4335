"""Certifies that a harness (an agent program) works with this build. A scripted model makes the harness carry out small
tasks, and the records of these sessions are checked. `task_check.py` checks tasks by their known solutions."""
