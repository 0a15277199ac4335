"""Fakes for tests, demos and dry runs: a scripted engine, engine servers, a sandbox runtime in memory, and servers of
E2B and Kubernetes. The fakes pass the contract tests of the real implementations.
"""
