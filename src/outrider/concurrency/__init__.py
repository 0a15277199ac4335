"""General tools for asyncio programs: retries, protection from cancellation, worker threads, garbage collection, and a
watchdog for the event loop.

The modules here do not depend on what the work is: they import no sessions, engines or sandboxes.
"""
