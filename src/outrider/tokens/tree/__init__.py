"""The token tree of a session: when messages are the same, and where each request joins what is recorded."""
