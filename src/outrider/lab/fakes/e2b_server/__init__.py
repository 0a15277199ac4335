"""A fake server of the E2B API on this machine, for tests. Its sandboxes are Linux namespaces with real processes."""
