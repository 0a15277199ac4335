"""The service: admission, scheduling on nodes, results and delivery of groups. No HTTP here."""
