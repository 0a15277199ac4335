"""Converts messages to token ids, and recorded turns to training samples.

The package does no I/O, except that it reads the tokenizer, the chat template and the image settings in a model's
folder. Nothing in it awaits or reads a clock.
"""
