"""The token tree of a session: equality of messages, and the point where each request joins the recorded
conversation."""
