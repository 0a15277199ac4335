"""The runtime `kubernetes`: each sandbox is a pod, made and accessed through the API server of a cluster."""
