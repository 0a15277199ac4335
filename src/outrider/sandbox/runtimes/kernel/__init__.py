"""Interfaces of this machine's kernel that the runtimes use: processes, control groups and mounts."""
