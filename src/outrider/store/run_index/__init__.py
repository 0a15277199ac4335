"""The index of runs: a SQLite file beside the store. The file is made from the store, and is read for lists,
comparisons and SQL queries.

The file is a cache: a deleted file is made again. No decision of the service depends only on the index.
"""
