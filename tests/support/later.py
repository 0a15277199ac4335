"""Large packages that only a few tests use. Each package is imported at its first use.

Every worker of pytest collects all tests. When these imports were at the top of the test files, they took half of the
processor time of a collection.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["anthropic", "genai", "openai", "safetensors", "torch", "transformers"]


class Later:
    """A stand-in for a module, with the module's attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks up such attributes of every name in a test file
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import anthropic
    import openai
    import safetensors.torch as safetensors
    import torch
    import transformers
    from google import genai
else:
    anthropic, genai, openai = map(Later, ("anthropic", "google.genai", "openai"))
    safetensors, torch, transformers = map(Later, ("safetensors.torch", "torch", "transformers"))
