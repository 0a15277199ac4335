"""Python interpreters for sandboxes: a portable CPython, and the IPython for it."""
