"""The node in this process, which hosts sessions with their sandboxes, model endpoints and lanes.

A node receives attempts and returns results. For nodes in other processes, see `nodes/`. Invariant: a session's
credential is valid only from the start of the attempt to the end of the run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from outrider.concurrency.cancellation import opened_in_thread
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.watchdog import Watchdog
from outrider.config import Config
from outrider.counts import CallFailures, NodeCounts
from outrider.errors import OutriderError, Unauthorized, record_of
from outrider.evaluators.endpoints import Endpoints
from outrider.lifecycle import StopReason
from outrider.logs import logged_for
from outrider.plugins import resolve
from outrider.redaction import KEY_PREFIX
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.network.proxy import ConnectionPool
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.node_folder import SWEEP_EVERY_SECONDS, NodeFolder, sweep
from outrider.sandbox.rootfs.pull import pull
from outrider.sandbox.rootfs.store import ImageStore, RootImage, has_image
from outrider.sandbox.runtimes.elsewhere import join_services
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandboxes
from outrider.sandbox.warm_pool import WarmLimits, WarmPool
from outrider.schemas import NodeStats
from outrider.sessions.artifacts import ArtifactCollector
from outrider.sessions.attempt import Attempt, AttemptStore, session_result, without_secrets
from outrider.sessions.calls.call import FrozenModel, ModelBackend
from outrider.sessions.lanes import Lanes
from outrider.sessions.models import SessionModels
from outrider.sessions.resources import NodeResources
from outrider.sessions.rollout import NodeServices, Rollout
from outrider.sessions.timelines import PROCESSES_EVERY_SECONDS, STORE_EVERY_SECONDS, Timelines
from outrider.spec import RuntimeSpec, with_default_runtime
from outrider.store.artifacts import KeepsArtifacts
from outrider.trajectory import SessionResult
from outrider.wire.file_descriptors import available, shares

log = logging.getLogger("outrider.session")

WRITE_CHECK = "node folder"
"""Name of the background check that tests every WRITE_CHECK_SECONDS whether the node's folder can be written."""
WRITE_CHECK_SECONDS = 2.0


class LocalNode:
    """The node in this process. Use it as `async with LocalNode(...) as node`. Leaving the block ends the node's
    background tasks and removes its folder with all contents."""

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        backend: ModelBackend,
        frozen: Sequence[FrozenModel] = (),
        store: AttemptStore,
        artifacts: KeepsArtifacts,
        resources: NodeResources,
        paths: HostPaths,
        service_silence: Callable[[], float] = lambda: 0.0,
        service_url: str | None = None,
        failures: Failures | None = None,
    ) -> None:
        """Failures of background work are recorded in `failures`. For `service_silence`, see `NodeServices`.
        If the service runs on another machine, `service_url` is its URL. Sandboxes must not reach the service through
        their network."""
        self.name = self.machine = name
        self._config = config
        self.backend = backend
        self._frozen = tuple(frozen)
        self._store = store
        self._artifacts = artifacts
        self._lanes = Lanes(config.lanes)
        self._resources = resources
        self._paths = paths
        self._service_silence = service_silence
        self._service_url = service_url
        self._held = AsyncExitStack()
        self.failures = failures or Failures()
        """Failures of the background work."""
        self._background = Chores(self.failures)
        """Runs the node's periodic work, such as the removal of leftovers, and the starts of sandboxes for grading."""
        self._models: dict[str, SessionModels] = {}
        self.call_failures = CallFailures()
        """The failed model calls of the node's own gateway."""

    async def __aenter__(self) -> Self:
        resolve("runtime", self._config.sandboxes.default_kind, field="sandboxes.default_kind")
        async with AsyncExitStack() as held:
            self._folder = await held.enter_async_context(opened_in_thread(NodeFolder.make, NodeFolder.remove))
            settings = self._config.sandboxes
            shared = Host(
                self._folder.path,
                starts_per_second=settings.starts_per_second,
                pods=settings.kubernetes,
                failures=self.failures,
            )
            host = await held.enter_async_context(shared)
            await sweep(host)
            await held.enter_async_context(self._background)
            watchdog = await held.enter_async_context(Watchdog())
            self._background.begin("sweeps", partial(sweep, host), every=SWEEP_EVERY_SECONDS, at_once=False)
            self._background.until_done("sandboxes elsewhere", partial(join_services, host))
            sandboxes = Sandboxes(
                host=host,
                background=self._background,
                paths=self._paths,
                gateway_socket=self.gateway_socket,
                pull=(settings := self._config.sandboxes).pull,
                network=NetworkRules(self._config, service_url=self._service_url),
                connections=ConnectionPool(shares(available()).network_proxies),
            )
            held.callback(sandboxes.pulls.cancel)
            warm = WarmLimits(each=settings.warm, memory_mb=settings.warm_memory_mb)
            timelines = Timelines(self._store)
            held.push_async_callback(timelines.store_rest)
            warm_pool = await held.enter_async_context(WarmPool(sandboxes, warm))
            self._services = NodeServices(
                model=self.backend,
                frozen=self._frozen,
                store=self._store,
                artifacts=ArtifactCollector(self._artifacts),
                lanes=self._lanes,
                resources=self._resources,
                sandboxes=sandboxes,
                warm_pool=warm_pool,
                timelines=timelines,
                watchdog=watchdog,
                endpoints=Endpoints(
                    self._config.graders, [model.name for model in self._config.frozen], called_here=True
                ),
                service_silence=self._service_silence,
            )
            self._background.begin("timelines", timelines.store, every=STORE_EVERY_SECONDS)
            self._background.begin("process lists", timelines.list_processes, every=PROCESSES_EVERY_SECONDS)
            self._background.begin(
                WRITE_CHECK, partial(asyncio.to_thread, self._folder.check_writable), every=WRITE_CHECK_SECONDS
            )
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    @property
    def gateway_socket(self) -> Path:
        """The Unix socket on which the model gateway must listen, because sandboxes without network use it."""
        return self._folder.path / "gateway.sock"

    @property
    def host(self) -> Host:
        """The objects that all sandboxes and evaluators of this node share."""
        return self._services.sandboxes.host

    def gateway_at(self, url: str) -> AbstractContextManager[None]:
        """Within the block, new sandboxes use `url` to reach the model gateway. See `Sandboxes.gateway_at`."""
        return self._services.sandboxes.gateway_at(url)

    def models(self, key: str) -> SessionModels | None:
        """Return the models to which a credential gives access, or None. A credential is valid only while its run
        lasts."""
        return self._models.get(key)

    async def refusal(self, key: str) -> OutriderError:
        """Return the error for a model call whose credential is not valid."""
        return Unauthorized("this session key is unknown, or its run is over")

    def note_stall(self, seconds: float) -> None:
        """Record that the service, which runs in another process, was stalled for `seconds`."""
        self._services.watchdog.note(seconds)

    def stats(self) -> NodeStats:
        """Return the state of the node. The capacity is 0 while the node's folder cannot be written, because every new
        sandbox would fail."""
        failing = tuple(msgspec.structs.replace(each, node=self.name) for each in self.failures.failing())
        return NodeStats(
            name=self.name,
            sessions=len(self._models),
            capacity=0 if any(each.name == WRITE_CHECK for each in failing) else self._lanes.capacity,
            lanes=self._lanes.stats(),
            resources=self._resources.stats(),
            warm=self._services.warm_pool.stats(),
            stalls=self._services.watchdog.stalls,
            failing=failing,
        )

    def counts(self) -> NodeCounts:
        """Return the counts of this node since its start."""
        return NodeCounts(sandboxes=self._services.sandboxes.starts.read(), failed_calls=self.call_failures.read())

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return has_image(runtime.image)

    async def pull_image(self, reference: str, name: str) -> RootImage:
        return await pull(reference, name, ImageStore(), node=self._services.sandboxes.host.folder)

    async def run(self, attempt: Attempt) -> SessionResult:
        """Run an attempt and return its result, which contains any error of the session. Raises only CancelledError."""
        # The time of a look-up in `_models` reveals nothing about the key, because Python hashes strings with a random
        # seed.
        key = f"{KEY_PREFIX}s_{secrets.token_urlsafe(24)}"
        task = with_default_runtime(attempt.task, self._config.sandboxes.default_kind)
        attempt = msgspec.structs.replace(attempt, task=task)
        with logged_for(attempt.logged):
            return await self._run(attempt, key)

    async def _run(self, attempt: Attempt, key: str) -> SessionResult:
        try:
            rollout = Rollout(attempt, key, self._services)
            self._models[key] = rollout.models
            return without_secrets(await rollout.run(), attempt.task)
        except Exception as error:  # for example, the stored turns cannot be read
            if not isinstance(error, OutriderError):
                log.exception("session %s failed unexpectedly", attempt.name)
            return session_result(attempt.session, StopReason.ERROR, [], task=attempt.task, error=record_of(error))
        finally:
            self._models.pop(key, None)
