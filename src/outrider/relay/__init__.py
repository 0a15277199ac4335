"""The worker's end of a relay: a program with a model, which the service cannot reach, serves it by dialling out.

`Worker` holds the connection, `FunctionEngine` makes an engine of any generate function, `hf` samples from a Hugging
Face model that is being trained. The service's end is `outrider.engines.relay`.
"""

from outrider.relay.function_engine import FunctionEngine
from outrider.relay.worker import Worker

__all__ = ["FunctionEngine", "Worker"]
