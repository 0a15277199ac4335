"""A small language model served inside the service process, for demos, tests and machines without an engine. Two
modules work with any model: `batch` does continuous batching, and `function_engine` turns a generate function into an
engine."""

from outrider.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

__all__ = ["EmbeddedEngine", "EmbeddedOptions"]
