"""The sandboxes of a node: made, prepared, kept warm ahead of sessions, and removed after a crash.

`sandbox/runtimes/` isolates sandboxes; `sessions/` works in them.
"""
