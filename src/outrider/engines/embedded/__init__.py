"""The embedded engine, an optional extra: importing this package imports no torch."""

from outrider.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions, EngineStats

__all__ = ["EmbeddedEngine", "EmbeddedOptions", "EngineStats"]
