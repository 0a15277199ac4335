"""Converts messages to token ids, and recorded turns to training samples: the token tree, rendering, branches and
samples.

The package is pure: nothing here awaits, reads a clock or does I/O, except the loading of a tokenizer and a template
from a model's folder.
"""
