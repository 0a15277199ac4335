"""Certifies one harness against this build: a scripted model makes it do small tasks, and the results are judged."""
