"""Any engine served over HTTP in the protocol of vLLM or SGLang."""

from outrider.engines.serve.app import engine_app, serving
from outrider.engines.serve.asgi import ServeSettings

__all__ = ["ServeSettings", "engine_app", "serving"]
