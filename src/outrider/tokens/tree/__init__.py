"""The token tree of a session. It decides whether messages are equal, and at which point each new request continues the
recorded conversation."""
