"""The exit codes of the command line. docs/failure.md lists the codes."""

SUCCESS = 0
FAILURE = 1
"""The command failed, or its outcome is bad, such as a failed session or a check that does not hold."""
USAGE = 2
"""The command line or the request is invalid."""
INTERRUPTED = 130
"""Ctrl-C. Shells report this code for a program that SIGINT has ended."""
