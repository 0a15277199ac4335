"""Implements the service: admission, scheduling on nodes, results and delivery of groups. `api/` serves the service
over HTTP."""
