"""The runtimes that start programs directly on the host. In `process`, programs are not isolated. In
`process-landlock`, Landlock confines them."""
