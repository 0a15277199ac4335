"""The evaluator `swebench`: runs a repository's tests in the sandbox to be graded, and judges their log with swebench's
grading.

- `options.py` defines the options of a task.
- `evaluator.py` runs the tests.
- `pytest_plugin.py` reports each test from inside pytest.
- `shadow_finder.py` finds modules that shadow a module which pytest imports.

`evaluators/checks/swebench_check.py` judges the log in a separate process.
"""
