"""The SWE-bench evaluator: runs a repository's tests in the graded sandbox, and judges their log by swebench's grading.

`options.py` is what a task says, `evaluator.py` runs the tests, `pytest_plugin.py` is what tells of each test from
inside pytest. The log is judged in a process of its own, by `evaluators/checks/swebench_check.py`.
"""
