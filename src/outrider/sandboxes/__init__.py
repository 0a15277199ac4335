"""The sandboxes of a node: made, prepared, kept warm ahead of sessions, and swept up after a crash.

They know runtimes and no session.
"""
