"""`Worker` lets a service use an engine that the service cannot connect to. The worker opens the connection instead.

    async with Worker("http://service:8700", generate, engine="trainer", token=TOKEN): ...

Invariants:

- The messages of a generation are kept until the service acknowledges them or no longer waits for them.
- A generation runs only once, even if the worker has to reconnect.
- A call from the service is executed only once, even if the service repeats it.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self, cast
from urllib.parse import quote
from uuid import uuid4

import aiohttp

from outrider.concurrency.loop_thread import LoopThread
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import Engine, SetsVersion, TakesConstraints, TokenizesText, weights_loader
from outrider.engines.embedded.function_engine import FunctionEngine, Generate
from outrider.engines.relay import messages
from outrider.engines.relay.messages import (
    MAX_TO_WORKER,
    PROTOCOL,
    TO_WORKER,
    AbortGeneration,
    Acknowledge,
    ToWorker,
    Version,
    WorkerCall,
    WorkerHello,
    WorkerReply,
    WorkerWelcome,
    pack_ids,
)
from outrider.errors import (
    UNREADABLE,
    Conflict,
    EngineMisbehaved,
    EngineRejected,
    Forbidden,
    NotFound,
    OutriderError,
    ServiceError,
    Unauthorized,
    record_of,
)
from outrider.plugins import plugin_code
from outrider.relay.generations import Generations
from outrider.wire.client_socket import dialled
from outrider.wire.link import Disconnected, Link
from outrider.wire.link_protocol import PROXY_STATUSES, Close, Nonsense, encode
from outrider.wire.tls import trusting

log = logging.getLogger("outrider.relay")

RECONNECTING = RetryPolicy(first=0.5, longest=20.0)
CONNECT_SECONDS = 20.0
REMEMBERED_ANSWERS = 256
"""Number of replies that are kept. If the connection breaks before a reply arrives, the service repeats its call, and
the kept reply is sent again."""

REFUSALS: dict[int, type[OutriderError]] = {
    Close.NONSENSE: EngineMisbehaved,
    Close.CONFLICT: Conflict,
    Close.REMOVED: Conflict,
    Close.PROTOCOL: Conflict,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
}
"""The errors that `Worker.run` raises. A key is a close code, or the HTTP status of a failed attempt to connect. After
such a code or status, reconnecting would fail again (but see PROXY_STATUSES). In all other cases, the worker
reconnects."""
HINTS: dict[int, str] = {
    Close.REMOVED: "the engine was removed from the service; a new worker adds it again",
    401: "give the service's token: Worker(..., token=...)",
    403: "give an admin's token: outrider token create --role admin",
    404: "is this an Outrider service, of the same version as the worker?",
}


class Worker:
    """Serves an engine to the service at `url` (`http://host:port`). `engine` is the engine's name in the service.

    - `generate`: an `Engine`, which the caller starts and closes, or a function (see `FunctionEngine`).
    - `update_weights(weights, version)`: a coroutine function that loads weights from the path `weights`, and raises an
      error if this fails. An engine that can load weights itself does not need this function.
    - `name`: shown in the service's logs and errors.
    - `ca`: a PEM file with the service's certificate authority, if this machine does not trust it.
    - `reconnecting`: how long to wait between attempts to connect.

    There are three ways to run a worker, one at a time. All raise the errors of `run`:

    - `await worker.run()`
    - `async with worker`, alongside other tasks on the event loop
    - `with worker.in_thread()`, alongside blocking code
    """

    def __init__(
        self,
        url: str,
        generate: Engine | Generate,
        *,
        engine: str = "trainer",
        token: str | None = None,
        ca: str | None = None,
        update_weights: Callable[[str, int], Awaitable[None]] | None = None,
        name: str | None = None,
        reconnecting: RetryPolicy = RECONNECTING,
    ) -> None:
        self.engine: Engine = cast(Engine, generate) if hasattr(generate, "generate") else FunctionEngine(generate)
        self.name = (name or platform.node() or "worker")[:100]
        self.url = f"{url.rstrip('/')}/v1/relay/{quote(engine, safe='')}"
        self.connections = 0
        """Number of connections that the service has accepted."""
        self._token = token
        self._trusted = trusting(ca)
        self._load = update_weights or weights_loader(self.engine)
        self._loading = asyncio.Lock()
        self._paused = False
        self._reconnecting = reconnecting
        self._instance = uuid4().hex
        self._generations = Generations(self.engine)
        self._answers: OrderedDict[int, WorkerReply | None] = OrderedDict()
        self._welcome: WorkerWelcome | None = None
        self._link: Link[ToWorker] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attached: Future[None] = Future()
        self._forget: asyncio.TimerHandle | None = None
        self._entered = AsyncExitStack()

    @property
    def running(self) -> bool:
        """True while `run` is running, and False after it has ended. Can be read from any thread."""
        return self._loop is not None

    async def run(self) -> None:
        """Serve until cancelled, and reconnect whenever the connection is lost. Raises:

        - Unauthorized: the token is wrong.
        - Forbidden: the token is not an admin's. Only raised before the service has accepted the worker.
        - NotFound: the service has no relay. Only raised before the service has accepted the worker.
        - Conflict: the service does not accept this worker, for example because its model, its engine or its protocol
          version differs.
        - EngineMisbehaved: the worker sent invalid messages.
        """
        if self.running:
            raise Conflict("this worker is running already", hint="make another one")
        self._loop = asyncio.get_running_loop()
        try:
            connector = aiohttp.TCPConnector(ssl=self._trusted or True)
            async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
                await self._stay_attached(session, tasks)
        except ExceptionGroup as group:  # a task group wraps errors in an ExceptionGroup
            if len(group.exceptions) > 1:
                raise
            self._set_attached(group.exceptions[0])
            raise group.exceptions[0] from None
        finally:
            self._loop = None
            if self._forget is not None:
                self._forget.cancel()
            self._generations.abort_all()
            self._answers.clear()

    async def __aenter__(self) -> Self:
        await self._entered.enter_async_context(self._running())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)

    async def attached(self) -> None:
        """Wait until the service has accepted the worker for the first time. Raises the errors of `run`."""
        await asyncio.shield(asyncio.wrap_future(self._attached))

    @contextmanager
    def in_thread(self, *, seconds: float | None = 30.0) -> Iterator[Self]:
        """Serve in a thread with its own event loop while the block runs. The block begins when the service has
        accepted the worker. If `seconds` is None, the block begins immediately. Raises ServiceError if the service does
        not accept the worker within `seconds`."""
        with LoopThread(f"relay {self.name}") as loop, loop.open(self):
            if seconds is not None:
                try:
                    self._attached.result(seconds)
                except FutureTimeout:
                    raise ServiceError(
                        f"{self.url} has not taken up the worker within {seconds:g} s",
                        hint="is the service running, and can it be reached from here?",
                    ) from None
            yield self

    def set_version(self, version: int) -> None:
        """Set the policy version of new tokens, and report it to the service. Can be called from any thread. Raises
        TypeError if the engine is not a `FunctionEngine`, because other engines have their own method `set_version`."""
        if not isinstance(self.engine, FunctionEngine):
            raise TypeError("this worker's engine has versions of its own: call the engine's set_version")
        self.engine.version = version
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # raised if the loop has been closed
                loop.call_soon_threadsafe(self._send_version, version)

    def _send_version(self, version: int) -> None:
        if self._link is not None:
            self._link.send(Version(version))

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self.run(), name=f"relay worker {self.name}")
                try:
                    yield
                except Exception as error:  # raised below, because the task group would wrap it in a group
                    failure = error
                finally:
                    task.cancel()
        except ExceptionGroup as wrapped:
            raise wrapped.exceptions[0] from None
        if failure is not None:
            raise failure

    async def _stay_attached(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        """Connect to the service, and reconnect whenever the connection is lost. Raises the errors of `run`."""
        failed = 0
        while True:
            before = self.connections
            try:
                end: object = await self._serve(session, tasks)
            except (aiohttp.ClientError, OSError, Disconnected, Nonsense, *UNREADABLE) as error:
                end = error
            code = end.code if isinstance(end, Disconnected) else getattr(end, "status", 0)
            passing = code in PROXY_STATUSES and self.connections > 0
            if (kind := REFUSALS.get(code)) is not None and not passing:
                raise kind(f"{self.url} refuses this worker: {getattr(end, 'reason', '') or end}", hint=HINTS.get(code))
            if self.connections > before:
                # After the code SILENT, the waits between attempts keep growing, because the next connection may end in
                # the same way.
                if code != Close.SILENT:
                    failed = 0
                # The service waits only `resume` seconds for the worker to reconnect. After that, nobody needs the
                # worker's generations, so they are stopped and their messages dropped.
                seconds = self._welcome.resume if self._welcome is not None else 0
                self._forget = asyncio.get_running_loop().call_later(seconds, self._generations.abort_all)
            log.info("worker %s has no connection to %s: %s", self.name, self.url, end)
            await asyncio.sleep(self._reconnecting.wait(failed))
            failed += 1

    async def _serve(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> Disconnected:
        """Open a connection, and serve until it ends. Returns how the connection ended."""
        async with dialled(session, self.url, self._token, seconds=CONNECT_SECONDS, max_bytes=MAX_TO_WORKER) as socket:
            with self._remembering():
                async with asyncio.timeout(CONNECT_SECONDS):
                    await socket.send(encode(await self._hello()))
                    welcome = TO_WORKER.decode(await socket.receive())
                if not isinstance(welcome, WorkerWelcome):
                    raise Nonsense("the service's first message is no welcome")
            link: Link[ToWorker] = Link(socket, TO_WORKER, heartbeat=welcome.heartbeat, silence=welcome.silence)
            self._welcome, self._link = welcome, link
            self.connections += 1
            self._set_attached(None)
            self._generations.attach(link, welcome)
            try:
                return await link.run(partial(self._handle, tasks=tasks))
            finally:
                self._link = None
                self._generations.detach()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Drop no generations while the block runs, because the service waits for the generations that the hello has
        named. If the block raises an error, the generations are dropped at the time that was set before, or at once if
        this time has passed."""
        forget = self._forget
        if forget is not None:
            forget.cancel()
        try:
            yield
        except BaseException:
            if forget is not None:
                self._forget = asyncio.get_running_loop().call_at(forget.when(), self._generations.abort_all)
            raise

    async def _hello(self) -> WorkerHello:
        health = await self.engine.health()
        return WorkerHello(
            protocol=PROTOCOL,
            instance=self._instance,
            name=self.name,
            model=health.model,
            context_tokens=health.context_tokens,
            logprob_kind=self.engine.logprob_kind,
            version=health.version,
            constraints=tuple(self.engine.constraints) if isinstance(self.engine, TakesConstraints) else (),
            tokenizes=isinstance(self.engine, TokenizesText),
            loads=self._load is not None,
            paused=self._paused,
            holds=self._generations.held,
        )

    def _handle(self, message: ToWorker, tasks: asyncio.TaskGroup) -> None:
        if isinstance(message, messages.StartGeneration):
            self._generations.start(message, tasks)
        elif isinstance(message, Acknowledge):
            self._generations.acknowledge(message.generation, message.number)
        elif isinstance(message, AbortGeneration):
            self._generations.abort(message.generation)
        elif isinstance(message, WorkerCall):
            # The service repeats a call if the connection broke before the reply. So this call may already be done, or
            # may still be running from its first request.
            if message.call not in self._answers:
                self._answers[message.call] = None
                while len(self._answers) > REMEMBERED_ANSWERS:
                    self._answers.popitem(last=False)
                tasks.create_task(self._answer(message), name=f"relay {message.action}")
            elif (answer := self._answers[message.call]) is not None and self._link is not None:
                self._link.send(answer)
        else:
            raise Nonsense("a second welcome")

    async def _answer(self, call: WorkerCall) -> None:
        try:
            with plugin_code():
                answer = await self._done(call)
        except Exception as error:  # the engine's code may raise any error
            record = record_of(error if isinstance(error, OutriderError) else EngineMisbehaved(f"{error!r}"))
            answer = WorkerReply(call=call.call, error=record)
        self._answers[call.call] = answer
        if self._link is not None:
            self._link.send(answer)

    async def _done(self, call: WorkerCall) -> WorkerReply:
        if call.action == "pause":
            # set first: if the connection breaks before the reply, the worker reports the pause when it reconnects
            self._paused = True
            await self.engine.pause(call.mode)
        elif call.action == "resume":
            await self.engine.resume()
            self._paused = False
        elif call.action == "health":
            return WorkerReply(call=call.call, health=await self.engine.health())
        elif call.action == "set_version":
            if not isinstance(self.engine, SetsVersion):
                raise EngineRejected(f"the engine of worker {self.name!r} cannot be told its version")
            await self.engine.set_version(call.version)
        elif call.action == "update_weights":
            await self._update_weights(call.weights, call.version)
        elif isinstance(self.engine, TokenizesText):
            ids = await self.engine.token_check(call.text)
            return WorkerReply(call=call.call, ids=None if ids is None else pack_ids(ids))
        return WorkerReply(call=call.call)

    async def _update_weights(self, weights: str, version: int) -> None:
        """Load new weights. Only one update runs at a time, even if the service stops waiting for an update and
        requests the next."""
        if self._load is None:
            raise EngineRejected(f"worker {self.name!r} cannot load weights")
        async with self._loading:
            await self._load(weights, version)
            if isinstance(self.engine, SetsVersion):
                await self.engine.set_version(version)

    def _set_attached(self, error: BaseException | None) -> None:
        if not self._attached.done():
            if error is None:
                self._attached.set_result(None)
            else:
                self._attached.set_exception(error)
