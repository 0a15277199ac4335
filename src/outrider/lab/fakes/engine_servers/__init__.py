"""Fake engine servers: serve any `Engine` over HTTP, in the protocol of vLLM or SGLang."""

from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings

__all__ = ["ServeSettings", "engine_app", "serving"]
