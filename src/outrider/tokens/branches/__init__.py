"""What each branch of a session was for: the main conversation, a sub-agent, a compaction, an auxiliary call."""
