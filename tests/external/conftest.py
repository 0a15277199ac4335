"""The fixture `cli` of the command line, for the tests of this folder."""

from cli.conftest import cli

__all__ = ["cli"]
