"""The benchmarks: what Outrider costs, measured beside what it is compared with. `python -m bench`."""
