"""Messages to token ids and back, for each model family."""
