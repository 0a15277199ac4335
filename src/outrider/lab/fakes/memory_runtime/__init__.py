"""The runtime `memory`: a fake sandbox for tests, with files in memory and a table of commands as its shell."""
