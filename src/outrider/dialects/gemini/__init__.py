"""Google generateContent: its request bodies, replies and streams."""
