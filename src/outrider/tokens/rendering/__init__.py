"""Messages to token ids, and sampled ids back to messages, by the rules of each model family."""
