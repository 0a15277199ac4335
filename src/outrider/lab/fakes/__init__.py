"""The fakes of the package, for tests, demos and dry runs: a scripted engine, engine servers, and a runtime in memory.
The fakes pass the contract tests of the real implementations.
"""
