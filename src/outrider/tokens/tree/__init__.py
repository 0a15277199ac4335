"""The token tree of a session, which finds the point where each request joins the recorded conversation, and the rules
by which messages count as equal."""
