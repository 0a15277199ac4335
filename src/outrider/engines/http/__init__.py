"""The HTTP client for engine servers: retries, server-sent events, and the translation of error responses.

Each server's own protocol is in `engines.adapters`.
"""
