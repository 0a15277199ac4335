"""The token tree of a session: finds the point where each request joins the recorded conversation, and decides whether
messages are equal."""
