"""Handles one model call of a session, from the bytes of the request body to the recorded turn."""
