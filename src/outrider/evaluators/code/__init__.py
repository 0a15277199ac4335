"""The evaluator of programs: cases and checks stay out of the reach of the program that they judge.

`guest.py` is what runs in sandboxes; the rest runs in the service and executes nothing of a candidate or a test.
"""
