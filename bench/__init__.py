"""The benchmarks: the cost of Outrider, compared with alternatives and floors. `python -m bench`."""
