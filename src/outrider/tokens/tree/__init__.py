"""The token tree of a session: every id once, and where each request joins it."""
