"""OpenAI Responses: its request bodies, replies, streams, and the items that later requests refer to."""
