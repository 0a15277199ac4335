"""The service: admission, scheduling on nodes, results and delivery of groups. `api/` serves it over HTTP."""
