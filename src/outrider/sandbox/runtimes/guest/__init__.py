"""The code that runs inside sandboxes: the tool server and its confinement.

Standard library only, Python 3.8 or newer. No module here imports the rest of Outrider.
"""
