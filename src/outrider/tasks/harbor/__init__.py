"""Makes tasks from Harbor task folders.

- `schema.py`: the schema of `task.toml`
- `fields.py`: a table with the use of each field
- `files.py`: reads the files of a folder
- `verifiers.py`: finds the sandbox in which the tests run
- `tasks.py`: makes the task, which the evaluator `harbor` grades
"""
