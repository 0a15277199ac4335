"""A Kubernetes cluster for tests: an API server with the part of the API that sandboxes use, and a machine that runs
the containers of pods in Linux namespaces."""
