"""A simulated service behind a blocking client, and a stand-in for the parts of a GRPOTrainer that the bridge reads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from bench.simulated_service import Played, SimulatedService

from outrider.client.client import Client
from outrider.concurrency.loop_thread import LoopThread
from outrider.trainers.trl import ServiceLogprobs

T = TypeVar("T")


class SimulatedClient:
    """The methods of `client.Client` that the bridge uses."""

    def __init__(self, service: SimulatedService, loop: LoopThread) -> None:
        self.asynchronous = service
        self.loads: list[tuple[int, str, str]] = []
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def open(self, manager: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
        return self._loop.open(manager)

    def policy(self) -> Any:
        return SimpleNamespace(version=self.asynchronous.version)

    def update_policy(self, version: int, *, mode: str = "finish", weights: str | None = None) -> Any:
        self.loads.append((version, mode, str(weights)))
        self.asynchronous.version = version
        return self.policy()


@contextmanager
def simulated(play: Callable[[Mapping[str, Any], int, int], Played], *, version: int = 0) -> Iterator[Client]:
    """Yield a client of a simulated service with 8 slots."""

    async def make() -> SimulatedService:
        return SimulatedService(play, slots=8)

    with LoopThread("simulated service") as loop:
        service = loop.run(make())
        service.version = version
        yield cast(Client, SimulatedClient(service, loop))


class BareTrainer:
    """A trainer without vLLM. `parameters` are the model's parameters."""

    def __init__(self, parameters: Mapping[str, Any], *, n: int = 4, processes: int = 1) -> None:
        self.num_generations = self.num_generations_eval = n
        self.use_vllm = False
        self._step, self._buffered_inputs = 0, None
        self.state = SimpleNamespace(global_step=0)
        self.model = SimpleNamespace(training=True, named_parameters=lambda: list(parameters.items()))
        self.accelerator = SimpleNamespace(num_processes=processes, unwrap_model=lambda model: model)


class Trainer(ServiceLogprobs, BareTrainer):
    pass
