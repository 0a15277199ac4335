"""The HTTP client for engine servers: connections, server-sent events, and the meaning of refusals.

The protocols of the servers do not belong here: see `engines.adapters`.
"""
