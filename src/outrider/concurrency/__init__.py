"""How work is done on the event loop: retried after a wait, shielded from cancellation, moved to a thread, watched.

Nothing here knows what the work is.
"""
