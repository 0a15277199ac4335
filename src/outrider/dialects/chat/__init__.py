"""OpenAI Chat Completions: its request bodies, replies and streams."""
