"""A small language model served inside the service process, for demos, tests and machines without an engine. Two
modules work with any model: `batch` has continuous batching, and `function_engine` makes an engine from a generate
function."""

from outrider.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

__all__ = ["EmbeddedEngine", "EmbeddedOptions"]
