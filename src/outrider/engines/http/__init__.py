"""The HTTP client for engine servers: connections, server-sent events, and the meaning of refusals.

The room is independent of any server's protocol.
"""
