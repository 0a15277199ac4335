"""Harnesses: agent programs, and how each one is installed, started and pointed at its model endpoint.

Most harnesses are data: `presets/` has a TOML file for each of them, and this file pins the version of the program. The
modules here run harnesses in a sandbox.
"""
