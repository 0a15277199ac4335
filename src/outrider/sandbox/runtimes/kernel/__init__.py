"""Processes, control groups and mounts of this machine, for the runtimes."""
