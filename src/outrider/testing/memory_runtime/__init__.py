"""A runtime without processes: files in memory, a very small shell, and failures on demand."""
