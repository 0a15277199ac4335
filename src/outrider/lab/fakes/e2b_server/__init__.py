"""A server of the E2B API on this machine, for tests and trials: its sandboxes are namespaces with real processes."""
