"""Interpreters that keep their state between commands: bash, Python and IPython."""
