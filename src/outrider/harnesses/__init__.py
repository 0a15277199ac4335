"""Harnesses: agent programs, and how each is installed, started and pointed at its model endpoint.

Most are data, in `presets/`. What runs them in a sandbox lives here too; the sandboxes do not.
"""
