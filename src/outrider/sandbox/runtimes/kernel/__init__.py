"""What the runtimes use of this machine's kernel: processes, control groups and mounts."""
