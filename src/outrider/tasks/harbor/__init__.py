"""Makes tasks from Harbor task folders.

`schema.py` is the schema of `task.toml`, `fields.py` the table of the use of each field, `files.py` reads the folder,
`verifiers.py` finds where the tests run, and `tasks.py` makes the task. The evaluator kind `harbor` grades these tasks.
"""
