"""The code that runs inside sandboxes: the tool server, and the modules that confine it.

It must run on Python 3.8 or newer with only the standard library. No module here imports another part of Outrider.
"""
