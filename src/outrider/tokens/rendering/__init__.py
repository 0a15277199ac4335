"""Converts messages to token ids, and sampled ids back to messages, by the rules of each model family.

The library `renderers` imports the OpenAI SDK and httpx, but only for an HTTP client that Outrider never calls.
Importing the SDK's 528 modules takes 0.75 s of the 1.7 s of processor time that a node process needs to start, and
httpx imports rich and click for its own command line. So this package imports `renderers` with stand-ins for the SDK
and httpx. If the process already has several threads, no stand-ins are used, because another thread might import a
stand-in instead of the real package.
"""

import contextlib
import sys
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


def _import_renderers() -> None:
    openai, httpx = (module_from_spec(ModuleSpec(name, None)) for name in ("openai", "httpx"))
    vars(openai)["AsyncOpenAI"] = object  # an empty class is enough: `renderers` uses it only in annotations
    # `renderers` keeps a reference to the stand-in. When a name of the stand-in is used later, the stand-in loads the
    # name from the real httpx.
    vars(httpx)["__getattr__"] = lambda name: _of_httpx(httpx, name)
    stand_ins = {module.__name__: module for module in (openai, httpx) if module.__name__ not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        # A different version of `renderers` may need more than the stand-ins have. The import then fails here, and the
        # next import of `renderers` loads the real packages.
        with contextlib.suppress(ImportError, AttributeError):
            import renderers  # noqa: F401
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _of_httpx(stand_in: ModuleType, name: str) -> Any:
    found = import_module("httpx")
    if found is stand_in:
        raise AttributeError(name)
    return getattr(found, name)


if threading.active_count() == 1:
    _import_renderers()
