"""Runtimes: each kind makes one type of sandbox. The interface is in `base`.

`guest` is the code that runs inside a sandbox. `tool_server` is the host's end of the connection to it. The in-memory
fake is in `testing`.
"""
