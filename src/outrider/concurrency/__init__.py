"""Tools for work on the event loop: retries, protection from cancellation, worker threads, a watchdog.

Nothing here depends on the kind of work.
"""
