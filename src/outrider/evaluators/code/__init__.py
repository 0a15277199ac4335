"""The evaluator of programs. The program under test cannot read the test cases and checks.

`guest.py` runs in sandboxes. The rest runs in the service, and executes no code of the program or of a test.
"""
