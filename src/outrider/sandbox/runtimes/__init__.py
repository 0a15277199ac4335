"""The kinds of sandbox, such as `docker` and `namespace`. Each kind implements the interface in `base`.

The folder `guest` has the code that runs inside a sandbox. `tool_server` has the code on the host that communicates
with the code in `guest`. `lab/fakes` has a runtime in memory for tests.
"""
