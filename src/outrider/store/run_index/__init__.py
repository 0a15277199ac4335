"""The index of runs: a SQLite file beside the store, made from the store, that lists, comparisons and SQL queries read.

The file is a cache: deleted, it is made again. No part of the service decides anything by the index alone."""
