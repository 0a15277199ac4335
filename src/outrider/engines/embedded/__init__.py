"""A small language model served inside the service process, for demos, tests and machines without an engine. The parts
that work with any model are also here: continuous batching (`batch`), and an engine made from a generate function
(`function_engine`)."""

from outrider.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions

__all__ = ["EmbeddedEngine", "EmbeddedOptions"]
