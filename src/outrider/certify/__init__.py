"""Certifies one harness against this build: a scripted model makes it do small tasks, and what is left is judged."""
