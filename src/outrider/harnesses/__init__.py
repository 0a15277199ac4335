"""Harnesses: agent programs, how each is installed, started and pointed at its model endpoint.

Most are data, in `presets/`.
"""
