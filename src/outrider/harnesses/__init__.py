"""Harnesses: agent programs, and how each is installed, started and pointed at its model endpoint.

Most harnesses are data: a TOML file each in `presets/`, with the pinned version of the program. This package also has
the code for running harnesses in a sandbox. `sandbox/` makes the sandboxes.
"""
