"""The evaluator `code`, which grades a program. The program cannot read the test cases and checks.

`guest.py` runs in sandboxes. The other modules run on the node, and execute no code of the program or of a test.
"""
