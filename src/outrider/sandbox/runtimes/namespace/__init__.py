"""The default runtime. It makes rootless sandboxes of Linux namespaces, which are forked from a zygote in
milliseconds."""
