"""Tokens, pure (no await, no clock, no I/O): the token tree, rendering, branches and training samples."""
