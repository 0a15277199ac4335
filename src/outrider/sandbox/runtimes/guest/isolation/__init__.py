"""Confines a new process as a sandbox: namespaces, mounts, seccomp and Landlock."""
