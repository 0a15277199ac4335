"""The kinds of sandbox, such as `docker` and `namespace`. All kinds implement the interface in `base`.

`guest` is the code that runs inside a sandbox. `tool_server` is the host's end of the connection to that code. A
runtime in memory, for tests, is in `lab/fakes`.
"""
