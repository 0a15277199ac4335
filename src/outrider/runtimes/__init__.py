"""Runtimes: each makes sandboxes of one kind. The seam is in `base`.

`guest` is the code that runs inside a sandbox, `tool_server` the host's end of it. The in-memory fake is in `testing`.
"""
