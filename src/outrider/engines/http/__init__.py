"""The HTTP client for engine servers: retries, server-sent events, and the translation of error responses.

The servers' own protocols are in `engines.adapters`.
"""
