"""The index of runs: a SQLite file beside the store, made from the store, that lists, comparisons and SQL queries read.

The file is a cache: a deleted file is made again. No decision of the service depends only on the index."""
