"""The SWE-bench evaluator: runs a repository's tests in the graded sandbox and judges their log with swebench's
grading.

`options.py` defines the options of a task, `evaluator.py` runs the tests, and `pytest_plugin.py` reports each test from
inside pytest. `evaluators/checks/swebench_check.py` judges the log in a separate process.
"""
