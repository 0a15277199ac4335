"""Decides the purpose of each turn of a finished session: main conversation, sub-agent, compaction or side call."""
