"""The worker's side of a relay, for a model that the service cannot connect to. A worker is a program that has the
model: it connects to the service, and generates when the service requests it.

`Worker` holds the connection, `FunctionEngine` makes an engine from any generate function, and `hf` samples from a
Hugging Face model in training. The service's side is `outrider.engines.relay`.
"""

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.relay.worker import Worker

__all__ = ["FunctionEngine", "Worker"]
