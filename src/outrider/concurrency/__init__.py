"""General tools for asyncio programs: retries, protection from cancellation, worker threads, garbage collection, and a
watchdog for the event loop.
"""
