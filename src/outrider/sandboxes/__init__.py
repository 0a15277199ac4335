"""The sandboxes of a node: made, prepared, kept warm ahead of sessions, and removed after a crash.

How a sandbox is isolated is decided in `runtimes/`; what happens in one, in `sessions/`.
"""
