"""The runtime `memory`: a fake sandbox for tests, whose files are in memory and whose shell is a table of commands."""
