"""Fakes for tests, demos and dry runs: a scripted engine, engine servers, a sandbox runtime in memory, and servers of
E2B and Kubernetes. They pass the same contract tests as the real implementations.
"""
