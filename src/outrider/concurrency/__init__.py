"""Ways to run work on the event loop: retry after a wait, shield from cancellation, move to a thread, watch.

The modules are independent of the kind of work.
"""
