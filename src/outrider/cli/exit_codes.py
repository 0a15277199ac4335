"""The exit codes of the command line. docs/failure.md lists the codes."""

SUCCESS = 0
FAILURE = 1
"""The command could not do its work, or the outcome is bad, such as a failed session or a check that does not hold."""
USAGE = 2
"""The request is invalid."""
INTERRUPTED = 130
"""Ctrl-C. Shells report this code for a program that SIGINT has ended."""
