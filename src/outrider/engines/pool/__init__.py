"""The engine pool: which engine serves a session, when generation is paused, and how a request runs on an engine."""
