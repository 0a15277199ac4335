"""The worker's end of a relay: a program whose model the service cannot reach connects to the service and generates for
it.

`Worker` holds the connection, `FunctionEngine` makes an engine from any generate function, and `hf` samples from a
Hugging Face model in training. The service's end is `outrider.engines.relay`.
"""

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.relay.worker import Worker

__all__ = ["FunctionEngine", "Worker"]
