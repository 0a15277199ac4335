"""Converts messages to token ids, and recorded turns to training samples.

The package does no I/O, except that it loads a tokenizer and a chat template from a model's folder. Nothing in it
awaits or reads a clock.
"""
