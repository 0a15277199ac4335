"""Harbor task folders, read as tasks.

`schema.py` is `task.toml`, `files.py` reads the folder, and `tasks.py` makes the task. What grades it is the evaluator
kind `harbor`.
"""
