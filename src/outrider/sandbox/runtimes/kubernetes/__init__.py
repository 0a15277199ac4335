"""The runtime `kubernetes`: each sandbox is a pod, made and entered through the API server of a cluster."""
