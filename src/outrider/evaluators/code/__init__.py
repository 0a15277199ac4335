"""The evaluator of programs. The judged program cannot read the test cases and checks.

`guest.py` runs in sandboxes. The rest runs in the service and executes no code of a candidate or a test.
"""
