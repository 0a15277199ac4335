"""A cluster for tests: an API server with the subset of the Kubernetes API that sandboxes use, and a machine that runs
the containers of pods in namespaces of this machine."""
