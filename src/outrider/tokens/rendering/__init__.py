"""Converts messages to token ids, and sampled ids back to messages, by the rules of each model family.

This package imports `renderers` without the OpenAI SDK, which `renderers` uses only for an HTTP client that Outrider
never calls. Without this trick, the import of the SDK's 528 modules took 0.75 s of the 1.7 s of processor time that the
start of a node process needed.
"""

import contextlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec


def _import_renderers() -> None:
    if "openai" in sys.modules:
        return
    sys.modules["openai"] = openai = module_from_spec(ModuleSpec("openai", None))
    vars(openai)["AsyncOpenAI"] = object  # enough, because `renderers` uses this class only in annotations
    try:
        # Another version of `renderers` may need more of the SDK, and then fails to import here. A later import of
        # `renderers` then imports the real SDK.
        with contextlib.suppress(ImportError, AttributeError):
            import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]


_import_renderers()
