"""A fake Kubernetes cluster for tests: an API server with the part of the API that sandboxes use, and a machine that
runs pods' containers in Linux namespaces."""
