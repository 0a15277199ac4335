"""One model call of a session, from the bytes of its body to a recorded turn."""
