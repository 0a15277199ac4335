"""What each turn of a finished session was for: the main conversation, a sub-agent, a compaction, a side call."""
