"""Messages to token ids, and sampled ids back to messages, by the rules of each model family.

Importing this package imports `renderers` without the OpenAI SDK, which `renderers` has for an HTTP client that
Outrider never calls. The SDK's 528 modules took 0.75 of the 1.7 s of processor time that a node process needs to start.
"""

import sys
from types import ModuleType


def _import_renderers() -> None:
    if "openai" in sys.modules:
        return
    sys.modules["openai"] = openai = ModuleType("openai")
    vars(openai)["AsyncOpenAI"] = object  # `renderers` names the class in annotations only
    try:
        import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]


_import_renderers()
