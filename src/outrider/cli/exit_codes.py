"""The exit codes of the command line. docs/failure.md explains them."""

SUCCESS = 0
FAILURE = 1
"""The command failed, or its outcome is bad. A bad outcome is, for example, a failed session or a failed check."""
USAGE = 2
"""The command line is invalid, or the service has refused the request as invalid."""
INTERRUPTED = 130
"""Ctrl-C. Shells report this code for a program that SIGINT has ended."""
