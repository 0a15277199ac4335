"""The worker's side of a relay. A relay serves a model that the service cannot connect to. Instead, the program that
has the model (the worker) connects to the service, and generates tokens when the service requests them.

`Worker` manages the connection. `FunctionEngine` turns any generate function into an engine. The module `hf` samples
from a Hugging Face model that is being trained. The service's side is `outrider.engines.relay`.
"""

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.relay.worker import Worker

__all__ = ["FunctionEngine", "Worker"]
