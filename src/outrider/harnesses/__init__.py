"""Harnesses: agent programs, and how each is installed, started and pointed at its model endpoint.

Most harnesses are data: `presets/` has a TOML file for each, with the pinned version of the program. This package also
has the code that runs harnesses in a sandbox.
"""
