"""Messages to token ids, and sampled ids back to messages, by the rules of each model family.

Importing this package imports `renderers` without the OpenAI SDK, which `renderers` has for an HTTP client that
Outrider never calls. The SDK's 528 modules took 0.75 of the 1.7 s of processor time that a node process needs to start.
"""

import contextlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec


def _import_renderers() -> None:
    if "openai" in sys.modules:
        return
    sys.modules["openai"] = openai = module_from_spec(ModuleSpec("openai", None))
    vars(openai)["AsyncOpenAI"] = object  # `renderers` names the class in annotations only
    try:
        # Another version of `renderers` may need more of the SDK. Its importers then get the SDK.
        with contextlib.suppress(ImportError, AttributeError):
            import renderers  # noqa: F401
    finally:
        del sys.modules["openai"]


_import_renderers()
