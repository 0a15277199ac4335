"""From messages to token ids, and from turns to training samples: the token tree, rendering, branches and samples.

Pure: nothing here awaits, reads a clock or does I/O, except to load a tokenizer and a template from their folder.
"""
