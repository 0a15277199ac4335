"""Makes tasks from Harbor task folders.

- `schema.py`: the schema of `task.toml`
- `fields.py`: a table with the use of each field
- `files.py`: reads the folder
- `verifiers.py`: finds where the tests run
- `tasks.py`: makes the task, which the evaluator kind `harbor` grades
"""
