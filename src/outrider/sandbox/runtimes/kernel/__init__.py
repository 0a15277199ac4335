"""Processes and control groups of this machine, for every runtime that starts processes directly."""
