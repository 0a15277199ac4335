"""The engine pool of one model. A pool assigns an engine to each session, runs each request on an engine, and pauses
all engines while the weights change."""
