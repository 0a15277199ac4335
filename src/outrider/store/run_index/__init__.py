"""The index of runs: a SQLite file with a copy of the store's groups and sessions, for lists, comparisons and SQL
queries.

The file is a cache: if it is deleted, it is made again from the store. No decision of the service depends only on it.
"""
