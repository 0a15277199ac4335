"""Makes tasks from the task folders of Harbor.

- `schema.py`: the schema of `task.toml`
- `fields.py`: a table that tells how each field is used
- `files.py`: reads the files of a folder
- `verifiers.py`: finds out in which sandbox the tests run
- `tasks.py`: makes the task, which the evaluator `harbor` grades
"""
