"""Harnesses: agent programs, and how each is installed, started and pointed at its model endpoint.

Most harnesses are data, in `presets/`. This package also has the code for running harnesses in a sandbox. `sandbox/`
makes the sandboxes.
"""
