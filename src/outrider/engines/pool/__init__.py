"""The engine pool: assigns an engine to each session, pauses generation, and runs each request on an engine."""
