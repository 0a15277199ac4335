"""The e2b runtime: sandboxes of a service that speaks the E2B API."""
