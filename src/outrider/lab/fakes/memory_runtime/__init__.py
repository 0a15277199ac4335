"""The runtime `memory`: a fake sandbox for tests, with files in memory and a very small shell."""
