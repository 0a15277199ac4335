"""The HTTP client for engine servers: connections, server-sent events, and the meaning of refusals.

Nothing here knows the protocol of a server.
"""
