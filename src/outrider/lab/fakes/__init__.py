"""Fakes that ship, for tests, demos and dry runs: a scripted engine, engine servers, and a runtime in memory.

Each passes the contract tests of the real implementations.
"""
