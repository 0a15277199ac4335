"""The evaluator of programs: test cases and checks are out of reach of the judged program.

`guest.py` runs in sandboxes. The rest runs in the service and executes no code of a candidate or a test.
"""
