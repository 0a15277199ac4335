"""The worker's end of a relay. A worker is a program whose model the service cannot reach: the worker connects to the
service, and generates when the service requests it.

`Worker` holds the connection, `FunctionEngine` makes an engine from any generate function, and `hf` samples from a
Hugging Face model in training. The service's end is `outrider.engines.relay`.
"""

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.relay.worker import Worker

__all__ = ["FunctionEngine", "Worker"]
