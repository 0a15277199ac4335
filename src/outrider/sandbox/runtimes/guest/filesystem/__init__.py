"""Reads, writes, searches, archives and restores files in a sandbox, whatever their names and depth."""
