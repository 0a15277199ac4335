"""The fakes of the package, for tests, demos and dry runs: a scripted engine, engine servers, a runtime in memory, and
a simulated service.

The engine, the servers and the runtime pass the contract tests of the real implementations.
"""
