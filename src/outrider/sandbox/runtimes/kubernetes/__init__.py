"""The runtime `kubernetes`. Each sandbox is a pod, which is made and accessed through the API server of a cluster."""
