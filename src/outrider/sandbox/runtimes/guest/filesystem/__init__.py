"""Reads, writes, searches, archives and restores files in a sandbox. File names may be of any kind, and folders of any
depth."""
