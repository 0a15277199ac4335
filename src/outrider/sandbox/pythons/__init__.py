"""Python interpreters for sandboxes: a portable CPython, and IPython for it."""
