"""How a new process becomes a confined sandbox: namespaces, mounts, seccomp and Landlock."""
