"""Stores the durable state of a service: groups, sessions, turns, results and images in SQL; artifacts in a folder."""
