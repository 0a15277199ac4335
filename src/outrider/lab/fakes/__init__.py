"""Fakes for tests, demos and dry runs: a scripted engine, engine servers, a sandbox runtime in memory, and servers of
E2B and Kubernetes. The contract tests of the real implementations pass with them.
"""
