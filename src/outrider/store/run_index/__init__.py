"""The index of runs: a SQLite file that copies the store's groups and sessions, for lists, comparisons and SQL queries.

The file is a cache: if it is deleted, it is filled again from the store. The service never relies on it alone for a
decision.
"""
