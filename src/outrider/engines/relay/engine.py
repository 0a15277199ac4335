"""The relay engine. Its workers connect to the service from outside, and the engine assigns each generation to one of
them.

Invariants: a generation moves to another worker only while none of its chunks was passed on. All workers of an engine
report the same kind of log-probabilities and name the same model. A worker gets no work while its version is older than
the version set on the engine, or was undone by setting a lower version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

import msgspec
import xxhash

from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.options import read_options
from outrider.engines.base import Capability, Chunk, EngineHealth, EngineOptions, GenerateRequest, PauseMode
from outrider.engines.relay.attached_worker import AttachedWorker, RelayOptions
from outrider.engines.relay.messages import MAX_HELLO, PROTOCOL, TO_SERVICE, ToService, Version, WorkerHello
from outrider.errors import UNREADABLE, EngineError, EngineRejected, EngineUnavailable, InvalidField, OutriderError
from outrider.trajectory import LogprobKind, TokenMode
from outrider.wire.link import Disconnected, Link, Socket
from outrider.wire.link_protocol import Close, close_reason

log = logging.getLogger("outrider.relay")

HELLO_SECONDS = 10.0
STAY = 4
"""If a session's own worker has more generations in flight than the least loaded worker, the session stays while the
difference is at most this number. The reason is that its own worker may have cached the session's prefix."""
FINAL = frozenset({Close.LEFT, Close.NONSENSE, Close.CONFLICT, Close.REMOVED, Close.PROTOCOL})
"""After these close codes, the worker is not expected to return. After any other end of a connection, the worker has
`resume_seconds` to reconnect."""
NO_WORKERS = "no worker is attached"
HINT = "run one where the model is: outrider.relay.Worker(URL, generate, engine={!r})"
LOADS = "give the worker a function that loads them: outrider.relay.Worker(..., update_weights=...)"

WorkerCheck = Callable[[AttachedWorker], Awaitable[None]]


class RelayEngine:
    """Implements `Engine`, `TokenizesText`, `SetsVersion` and `AwaitsWorkers`, and `LoadsWeights` while all workers can
    load weights.

    `logprob_kind` and `constraints` come from the workers, and are known once the first worker has attached.
    """

    mode = TokenMode.TOKENS
    awaits_workers = True
    # each worker must itself drop the keys and values of old weights
    capabilities = frozenset({Capability.VERSIONED_CACHE})

    def __init__(self, options: EngineOptions) -> None:
        if options.url is not None:
            raise InvalidField(
                f"engine {options.name!r} is a relay: it has no URL, its workers connect to this service",
                field="url",
            )
        self.name = options.name
        self.logprob_kind = LogprobKind.SAMPLING
        self._options = read_options(RelayOptions, options.options)
        self._workers: dict[str, AttachedWorker] = {}
        self._arriving: dict[str, AttachedWorker] = {}
        """Workers that are being checked and brought to the state of the other workers, by instance."""
        self._paused: PauseMode | None = None
        self._version = 0
        """The version set on the engine."""
        self._undone: set[int] = set()
        """Versions that were undone by setting a lower version. A worker that still reports one of these versions has
        missed the order to go back."""
        self._weights: str | None = None
        """The location from which workers can load the weights of `_version`; None if there is none."""
        # Start at a random number, because a worker may still have generations of an earlier service, whose numbers
        # must not be used again.
        self._numbers = itertools.count(secrets.randbits(48))
        self._closed = False
        self._constraints: frozenset[ConstraintKind] = frozenset()
        self._context: int | None = None
        """The length of the model's context, as the first of the attached workers has reported it."""
        self._refused = ""
        """A suffix for error messages: which worker was cut off for breaking the protocol, and why. It is "" again once
        the next worker has attached."""

    @property
    def constraints(self) -> frozenset[ConstraintKind]:
        """The kinds of constraints that at least one worker supports: a request goes only to workers that support its
        constraint. While no worker is attached, these are the kinds of the last attached worker. A request with a
        constraint then fails because no worker is attached, and is not refused as an invalid request."""
        return self._constraints

    @property
    def loads_weights(self) -> bool:
        """True if every worker can load weights."""
        return all(worker.hello.loads for worker in self._workers.values())

    async def start(self) -> None:
        """Do nothing, because workers connect by themselves."""

    async def close(self) -> None:
        self._closed = True
        for worker in [*self._workers.values(), *self._arriving.values()]:
            worker.cut_off(Close.REMOVED, f"engine {self.name!r} was removed")
            self._drop(worker, f"engine {self.name!r} was removed")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        tried: set[AttachedWorker] = set()
        failure: EngineUnavailable | None = None
        while True:
            worker = self._choose(request, tried)
            if worker is None:
                raise failure or self._nobody(request.sampling.constraint)
            begun = False
            try:
                async with aclosing(worker.generate(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                worker.failing = False
                return
            except EngineUnavailable as error:
                worker.failing = True
                if begun:
                    raise
                tried.add(worker)
                failure = error

    async def health(self) -> EngineHealth:
        """Report the engine as healthy if at least one worker is. A worker whose context is shorter than the others' is
        dropped."""
        workers = list(self._workers.values())
        if not workers:
            return self._unhealthy()
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(worker.health()) for worker in workers]
        answers = [task.result() for task in asked]
        good = []
        for worker, answer in zip(workers, answers, strict=True):
            if not answer.ok:
                continue
            if (conflict := self._too_short(answer.context_tokens)) is not None:
                worker.cut_off(Close.CONFLICT, conflict)
                self._drop(worker, conflict)
                continue
            self._context = self._context or answer.context_tokens
            good.append(answer)
        if not good:
            return next((answer for answer in answers if not answer.ok), self._unhealthy())
        # A worker with an outdated version gets no work, so its version does not count.
        fresh = [answer for answer in good if not self._is_outdated(answer.version)] or good
        return EngineHealth(
            ok=True,
            detail=f"{len(good)} of {len(workers)} workers",
            model=next((answer.model for answer in good if answer.model is not None), None),
            context_tokens=self._context,
            version=min(answer.version for answer in fresh),
        )

    def _unhealthy(self) -> EngineHealth:
        return EngineHealth(ok=False, detail=self._nobody().message)

    async def pause(self, mode: PauseMode) -> None:
        """Pause all workers. A worker that attaches later is paused before it gets work. Raises the workers' errors."""
        self._paused = mode
        _raise_first(await self._each(lambda worker: worker.pause(mode)))

    async def resume(self) -> None:
        self._paused = None
        _raise_first(await self._each(lambda worker: worker.resume()))

    async def set_version(self, version: int) -> None:
        if version != self._version:
            self._note_version(version)
            self._weights = None
        _raise_first(await self._each(lambda worker: worker.set_version(version)))

    async def update_weights(self, weights: str, version: int) -> None:
        """Load weights on every worker. A worker without a connection gets the order when it reconnects. A worker that
        fails, or attaches during the update, is disconnected. When it reconnects, it must load the weights before it
        gets work, like any new worker. If no worker has loaded the weights, raises a worker's error."""
        if unable := [worker.name for worker in self._workers.values() if not worker.hello.loads]:
            raise EngineRejected(f"{', '.join(unable)} cannot load weights", hint=LOADS)
        asked = list(self._workers.values())
        failures = await self._each(lambda worker: worker.update_weights(weights, version))
        if not any(worker.gone is None and worker not in failures for worker in asked):
            raise next(iter(failures.values()), self._nobody())
        self._note_version(version)
        self._weights = weights
        for worker in list(self._workers.values()):
            if worker in failures or self._is_outdated(worker.version):
                reason = failures[worker].message if worker in failures else f"it has to load version {version}"
                worker.cut_off(Close.SILENT, reason)
                self._drop(worker, reason)

    async def token_check(self, text: str) -> list[int] | None:
        """Tokenise the text on one of the workers that can tokenise. The choice does not matter, because each worker's
        tokenizer was checked when the worker was admitted."""
        for worker in self._workers.values():
            if worker.connected and worker.hello.tokenizes:
                return await worker.token_check(text)
        return None

    async def serve(
        self,
        socket: Socket,
        *,
        check: WorkerCheck | None = None,
        attached: Callable[[], object] = lambda: None,
    ) -> None:
        """Serve a connection of a worker until the connection ends. `check` may refuse the worker by raising an
        OutriderError. The worker then gets no work. `attached` is called when a worker can get work."""
        try:
            hello = await _hello(socket)
        except _Refused as refused:
            log.warning("relay %s refused a worker: %s", self.name, refused)
            await _refuse(socket, refused)
            return
        except Disconnected:
            return
        link: Link[ToService] = Link(
            socket,
            TO_SERVICE,
            heartbeat=self._options.heartbeat_seconds,
            silence=self._options.silence_seconds,
            stranger=True,
        )
        worker = self._workers.get(hello.instance)
        if worker is not None:
            await self._run(worker, link, hello, attached)
            return
        if (conflict := self._conflict(hello)) is not None:
            log.warning("relay %s refused worker %s: %s", self.name, hello.name, conflict)
            await _refuse(socket, _Refused(Close.CONFLICT, conflict))
            return
        if (earlier := self._arriving.get(hello.instance)) is not None:
            earlier.cut_off(Close.REPLACED, "this worker has connected again")
            earlier.give_up("it has connected again")
        worker = AttachedWorker(hello, self.name, self._options, self._numbers)
        async with asyncio.TaskGroup() as group:
            admission = group.create_task(self._admit(worker, check, attached), name=f"admit {worker.name}")
            await self._run(worker, link, hello, attached)
            admission.cancel()

    async def _run(
        self, worker: AttachedWorker, link: Link[ToService], hello: WorkerHello, news: Callable[[], object]
    ) -> None:
        """Serve a connection of a worker. When it ends, decide whether the worker may return."""

        def handle(message: ToService) -> None:
            worker.handle(message)
            if isinstance(message, Version):
                self._undone.discard(message.version)  # the weights are new, even if the number was used before
                news()  # a worker whose version was too old can get work now

        worker.connect(link, hello)
        end: Disconnected | None = None
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(worker.send_generations(link), name=f"generations of {worker.name}")
                try:
                    end = await link.run(handle)
                finally:
                    sending.cancel()
        finally:
            if worker.disconnect(link):
                self._disconnected(worker, end)

    async def _admit(
        self,
        worker: AttachedWorker,
        check: WorkerCheck | None,
        attached: Callable[[], object],
    ) -> None:
        """Check a new worker, apply the engine's pause and weights to it, and let it get work."""
        self._arriving[worker.hello.instance] = worker
        fits = False
        try:
            if check is not None:
                await check(worker)
            fits = True
            await self._bring_up(worker)
        except OutriderError as error:
            log.warning("relay %s refused worker %s: %s", self.name, worker.name, error.message)
            # A worker that was too slow, or that failed to carry out an order, may connect again.
            comes_back = fits or isinstance(error, EngineUnavailable)
            worker.cut_off(Close.SILENT if comes_back else Close.CONFLICT, error.message)
            worker.give_up(error.message)
            return
        finally:
            if self._arriving.get(worker.hello.instance) is worker:
                del self._arriving[worker.hello.instance]
        if worker.gone is not None:
            return
        # Check again, because other workers may have attached meanwhile.
        conflict = self._conflict(worker.hello)
        if conflict is not None:
            worker.cut_off(Close.CONFLICT, conflict)
            worker.give_up(conflict)
            return
        self.logprob_kind = worker.logprob_kind
        self._workers[worker.hello.instance] = worker
        self._note_constraints()
        self._refused = ""
        self._context = self._context or worker.hello.context_tokens
        log.info("relay %s: worker %s attached", self.name, worker.name)
        attached()

    async def _bring_up(self, worker: AttachedWorker) -> None:
        """Apply the engine's pause and weights to a new worker, and again if they change meanwhile. Raises the worker's
        errors."""
        paused: PauseMode | None = "finish" if worker.hello.paused else None
        loaded: tuple[str, int] | None = None
        while True:
            # If the worker has an undone version whose number is in use again, its weights may be the undone ones.
            unsure = worker.version in self._undone and loaded != (self._weights, self._version)
            if paused != (wanted := self._paused):
                await (worker.resume() if wanted is None else worker.pause(wanted))
                paused = wanted
            elif self._weights is not None and worker.hello.loads and (unsure or self._is_outdated(worker.version)):
                loaded = self._weights, self._version
                await worker.update_weights(*loaded)
            else:
                return

    def _disconnected(self, worker: AttachedWorker, end: Disconnected | None) -> None:
        """If the connection of a worker broke, give it time to reconnect. If it has left or was cut off, drop it."""
        if worker.gone is not None:
            return
        if end is not None and end.code == Close.NONSENSE:
            log.warning("relay %s: worker %s is cut off: %s", self.name, worker.name, end.reason)
            self._refused = f"; worker {worker.name!r} was cut off: {end.reason}"
        # `end` is None if this service itself is being closed.
        if end is not None and end.code not in FINAL:
            log.info("relay %s: worker %s lost its connection: %s", self.name, worker.name, end)
            worker.deadline = asyncio.get_running_loop().call_later(
                self._options.resume_seconds,
                self._drop,
                worker,
                f"it did not come back within {self._options.resume_seconds:g} s",
            )
        else:
            self._drop(worker, end.reason or "it has left" if end is not None else "the service is closing")

    def _drop(self, worker: AttachedWorker, reason: str) -> None:
        if self._workers.get(worker.hello.instance) is worker:  # another object may represent this worker by now
            del self._workers[worker.hello.instance]
            if self._workers:
                self._note_constraints()
            else:
                self._context = None
        log.info("relay %s: worker %s is gone: %s", self.name, worker.name, reason)
        worker.give_up(reason)

    def _conflict(self, hello: WorkerHello) -> str | None:
        """Return the reason why a new worker cannot serve together with the attached ones, or None if it can."""
        if self._closed:
            return f"engine {self.name!r} was removed"
        for other in self._workers.values():
            if other.logprob_kind is not hello.logprob_kind:
                return f"log-probabilities are {other.logprob_kind} here, not {hello.logprob_kind}"
            if other.model is not None and hello.model is not None and other.model != hello.model:
                return f"the model here is {other.model}, not {hello.model}"
        return self._too_short(hello.context_tokens)

    def _too_short(self, context: int | None) -> str | None:
        """Return the reason why a worker with this context cannot serve here, or None if it can. A shorter context is
        refused: it would become the engine's context, and a prompt that does not fit the context ends its session."""
        if context is None or self._context is None or context >= self._context:
            return None
        return f"the model's context here is {self._context} tokens, not {context}"

    def _choose(self, request: GenerateRequest, tried: set[AttachedWorker]) -> AttachedWorker | None:
        """Return a worker, or None if there is none left to try. Workers are preferred in this order: connected, not
        `failing`, least loaded. Each session has its own worker, chosen by hash. The session stays on it unless another
        worker is better by the first two criteria, or has much less load."""
        constraint = request.sampling.constraint
        workers = [
            worker
            for worker in self._workers.values()
            if worker not in tried
            and not self._is_outdated(worker.version)
            # Checked again here, because a worker that does not support the constraint may have attached after the
            # request was accepted.
            and (constraint is None or constraint.kind in worker.hello.constraints)
        ]
        if not workers:
            return None

        def rank(worker: AttachedWorker) -> tuple[bool, bool, int]:
            return not worker.connected, worker.failing, worker.in_flight

        best = min(workers, key=rank)
        own = max(
            workers, key=lambda worker: xxhash.xxh3_64_intdigest((request.session_key + worker.hello.instance).encode())
        )
        stays = rank(own)[:2] == rank(best)[:2] and own.in_flight <= best.in_flight + STAY
        return own if stays else best

    async def _each(self, act: Callable[[AttachedWorker], Awaitable[None]]) -> dict[AttachedWorker, EngineError]:
        """Run `act` on every worker concurrently. Returns the failures by worker, except those of workers that have
        left meanwhile."""
        failures: dict[AttachedWorker, EngineError] = {}

        async def one(worker: AttachedWorker) -> None:
            try:
                await act(worker)
            except EngineError as error:
                if worker.gone is None:
                    failures[worker] = error

        async with asyncio.TaskGroup() as group:
            for worker in list(self._workers.values()):
                group.create_task(one(worker))
        return failures

    def _note_version(self, version: int) -> None:
        """Set the version of the engine. If it is lower than before, the versions above it are undone."""
        if version < self._version:
            workers = (*self._workers.values(), *self._arriving.values())
            self._undone |= {known for known in (self._version, *(each.version for each in workers)) if known > version}
        self._version = version

    def _is_outdated(self, version: int) -> bool:
        """Return True if a worker with this version must get no work."""
        return version < self._version or (version != self._version and version in self._undone)

    def _note_constraints(self) -> None:
        self._constraints = frozenset(kind for worker in self._workers.values() for kind in worker.hello.constraints)

    def _nobody(self, constraint: Constraint | None = None) -> EngineUnavailable:
        if constraint is not None and any(not self._is_outdated(worker.version) for worker in self._workers.values()):
            return EngineUnavailable(f"relay {self.name!r}: no worker that is left supports {constraint.kind}")
        if self._workers:
            return EngineUnavailable(f"relay {self.name!r}: no worker has policy version {self._version} yet")
        return EngineUnavailable(f"relay {self.name!r}: {NO_WORKERS}{self._refused}", hint=HINT.format(self.name))


def _raise_first(failures: Mapping[AttachedWorker, EngineError]) -> None:
    for error in failures.values():
        raise error


class _Refused(Exception):
    def __init__(self, code: Close, reason: str) -> None:
        super().__init__(reason)
        self.code = code


async def _hello(socket: Socket) -> WorkerHello:
    """Receive a worker's first message. Raises _Refused and Disconnected."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            frame = await socket.receive()
    except TimeoutError:
        raise _Refused(Close.SILENT, f"no hello came within {HELLO_SECONDS:g} s") from None
    if len(frame) > MAX_HELLO:
        raise _Refused(Close.NONSENSE, f"the first message has {len(frame)} bytes: it is no hello")
    try:
        # First read only the protocol's number, because the rest of another version's hello may be unreadable.
        protocol = msgspec.msgpack.decode(frame, type=_AnyHello).protocol
        if protocol != PROTOCOL:
            raise _Refused(Close.PROTOCOL, f"this service speaks protocol {PROTOCOL}, not {protocol}: update the older")
        hello = TO_SERVICE.decode(frame)
    except UNREADABLE as error:
        raise _Refused(Close.NONSENSE, f"the first message is no hello: {error}") from error
    if not isinstance(hello, WorkerHello):
        raise _Refused(Close.NONSENSE, "the first message is no hello")
    return hello


class _AnyHello(msgspec.Struct):
    protocol: int


async def _refuse(socket: Socket, refused: _Refused) -> None:
    try:
        await socket.close(refused.code, close_reason(str(refused)))
    except Disconnected:
        return
