"""Sandboxes made by Docker, Podman or gVisor, through the Docker Engine API."""
