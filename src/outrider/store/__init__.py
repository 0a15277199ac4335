"""The durable state: groups, sessions, turns, results and images in SQL; artifacts in a folder."""
