"""Python interpreters that are put into sandboxes: a portable CPython, and the IPython that goes with it."""
