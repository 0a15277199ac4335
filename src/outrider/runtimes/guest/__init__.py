"""The code that runs inside sandboxes: the tool server and what confines it.

Standard library only, Python 3.8 or newer: nothing here imports the rest of Outrider.
"""
