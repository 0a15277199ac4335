"""Harnesses: agent programs, and how each is installed, started and pointed at its model endpoint.

Most harnesses are data: a TOML file each in `presets/`, with the pinned version of the program. The code for running
harnesses in a sandbox is here too; `sandbox/` makes the sandboxes.
"""
