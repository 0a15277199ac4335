"""A small language model served inside the service process, for demos, tests and machines without an engine; and the
parts with which any model is sampled here: continuous batches, and an engine of any generate function."""

from outrider.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

__all__ = ["EmbeddedEngine", "EmbeddedOptions"]
