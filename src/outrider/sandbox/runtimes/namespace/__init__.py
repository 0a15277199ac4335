"""The default runtime: rootless sandboxes of Linux namespaces, forked from a zygote in milliseconds."""
