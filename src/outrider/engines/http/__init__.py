"""The HTTP client for engine servers: connections, server-sent events, and what refusals mean.

It knows no server's protocol.
"""
