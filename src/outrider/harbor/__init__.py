"""Harbor task folders, read as tasks.

`schema.py` is `task.toml`, `fields.py` says what becomes of each of its fields, `files.py` reads the folder,
`verifiers.py` says where the tests run, and `tasks.py` makes the task. What grades it is the evaluator kind `harbor`.
"""
