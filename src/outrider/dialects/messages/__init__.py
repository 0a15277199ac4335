"""Anthropic Messages: its request bodies, replies and streams."""
