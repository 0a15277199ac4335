"""The fakes of the package, for tests, demos and dry runs. They pass the same contract tests as the real
implementations: a scripted engine, engine servers, a sandbox runtime in memory, and servers of E2B and Kubernetes.
"""
