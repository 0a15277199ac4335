"""One run: starts a service, an engine and consumers, submits groups, injects the faults of its seed, and checks the
results."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.support.disk import a_disk

from campaign import leaks
from campaign.checks import Finding, Harm, Told, judge, read_calls
from campaign.faults import (
    ON_MACHINES,
    ON_NODES,
    ON_POSTGRESQL,
    ON_SQLITE,
    SILENCES,
    Fault,
    FaultKind,
    draw_faults,
)
from campaign.fleet import Fleet, Machine, machines_of
from campaign.processes import Program, ProgramStarter
from campaign.proxy import Direction, FaultyProxy
from campaign.reader import Reader
from campaign.receiver import receiving
from campaign.seams import Knobs
from campaign.stores import Cluster, SqliteUnderTest, StoreUnderTest
from campaign.tasks import draw_groups
from outrider.client.client import AsyncClient
from outrider.errors import NotFound, OutriderError, ServiceError
from outrider.lifecycle import GroupState, SessionState
from outrider.sandbox.runtimes.kernel import process_marks
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.schemas import GroupView

GROUPS = 50
SUBMITTERS = 6
CANCELLED = 4
"""Number of groups that their client cancels."""
REPEATED = 0.2
"""Fraction of the groups that are submitted a second time, with the same idempotency key."""
STALL_SECONDS = 60.0
"""After this many seconds without progress, the groups that are not delivered are reported as lost."""
START_SECONDS = 60.0
"""Maximum time from the start of a program until it listens, in seconds."""
IDLE_SECONDS = 2.0
BUSY_LOOKS = 30
BUSY_SESSIONS = 8
MACHINE_LOOKS = 200
"""Maximum number of checks for a running session on a machine, which may have to join first."""
LOOK_SECONDS = 0.1
PAUSE_SECONDS = 0.1
DISK_MIB = 64
FULLEST_COMMIT = 0.2
DAY = 86_400.0
LEAST_JUMP = 7200.0
"""Minimum jump of the clock, in seconds: more than one hour. A push that is due within the next hour waits, because the
receiver may have requested the delay."""
MOST_CUTS = 5
CUT_PAUSE_SECONDS = 0.7
"""Seconds between two cuts: at least as long as a node waits before it dials again."""
SLOW = 8
"""A slow connection is blocked for this many times the `seconds` of its fault. After ten seconds a node dials again."""
SILENT_SECONDS = 22.0
"""Minimum length of a silence. The service declares a node lost after 20 seconds, and a node declares the service lost
after 30."""
DIRECTIONS = (tuple(Direction), (Direction.TO_SERVICE,), (Direction.FROM_SERVICE,))
"""The directions in which a connection can be slow or silent."""
JOIN_SECONDS = 90.0
"""Maximum time until all nodes have joined again, in seconds: the service first declares killed machines lost."""
DRIP_SECONDS = 4.0
"""Seconds between two chunks of a reply. Each reply has four chunks."""
FIRST_COMMIT_SECONDS = 0.5
"""Seconds within which a commit begins. This commit then takes long, and delays all later commits."""
T = TypeVar("T")

READERS = ("reader", "crashing reader")


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `kills` counts SIGKILLs. `grown` is the growth of the last service's memory (MiB) and
    descriptors from its start to its end. `left_out` are the faults that are impossible on this machine."""

    seed: int
    fleet: Fleet
    seconds: float
    groups: int
    kills: int
    faults: list[str]
    left_out: list[str]
    endings: dict[str, int]
    attempts: int
    turns: int
    grown: tuple[float, int]
    findings: list[Finding]
    folder: str | None


class Progress:
    """The progress of a run: an accepted group counts a quarter of a delivered group."""

    def __init__(self, groups: int) -> None:
        self._all = groups * 4
        self._done = 0
        self._changed = asyncio.Condition()
        self.moved = time.monotonic()

    async def set(self, *, accepted: int, delivered: int) -> None:
        if (done := accepted + 3 * delivered) > self._done:
            self._done = done
            self.moved = time.monotonic()
            async with self._changed:
                self._changed.notify_all()

    @property
    def all_but_last(self) -> bool:
        """True if all groups are delivered, except the group that is submitted after the last fault."""
        return self._done >= self._all - 4

    async def until(self, share: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._done >= share * self._all)


class Run:
    """One run, to be used once (`await Run(...).run()`), with a folder of its own. `program` is the module of the
    service. `faults` replace those of the seed."""

    def __init__(
        self,
        starter: ProgramStarter,
        seed: int,
        folder: Path,
        *,
        groups: int,
        program: str,
        fleet: Fleet,
        faults: Sequence[Fault] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._starter = starter
        self._rng = random.Random(seed)
        self._seed = seed
        self._folder = folder
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self._knobs = Knobs(folder / "knobs")
        self._cluster = cluster
        self._store: StoreUnderTest
        self._count = groups
        self._program = program
        self._fleet = fleet
        self._machines: list[Machine]
        self._nodes: set[int] = set()
        """All processes of nodes so far, without those of the services."""
        kinds = ON_SQLITE if cluster is None else ON_POSTGRESQL
        kinds += (*ON_NODES,) * fleet.several + ON_MACHINES * bool(fleet.machines)
        self._faults = draw_faults(self._rng, kinds) if faults is None else faults
        self._machines_leave = self._rng.random() < 0.5
        """True if joined machines leave before the service ends, False if they leave after its end."""
        self._left_out: list[str] = []
        self._progress = Progress(groups)
        self._views: dict[str, Reader] = {}
        self._accepted: dict[str, list[str]] = {}
        self._with_callback: set[str] = set()
        self._kills = 0
        self._killed: set[str] = set()
        """Names of sandboxes in which a process was killed."""
        self._breaking = 0
        """Number of faults that are under way."""
        self._grown = (0.0, 0)

    async def run(self) -> RunReport:
        begun = time.monotonic()
        findings: list[Finding] = []
        with a_disk(self._folder / "data", DISK_MIB) as self._disk:
            service, engine = free_port(), free_port()
            self._proxy = FaultyProxy(engine)
            async with (
                receiving(self._rng) as self._receiver,
                self._proxy.open(),
                machines_of(self._fleet, self._starter, self._folder, service) as self._machines,
                asyncio.TaskGroup() as tasks,
            ):
                await self._start(service, engine, tasks)
                async with AsyncClient(self._url) as self._client:
                    await self._until_complete()  # faults at the start of the run need running targets
                    findings += await self._drive(tasks)
                    findings += await self._stop()
            ended = time.monotonic()
            readers = {name: self._read(name) for name in READERS}
            for view in self._views.values():
                view.close()
            told = Told(
                accepted=self._accepted,
                readers=readers,
                with_callback=frozenset(self._with_callback),
                pushes=self._receiver.pushes,
                taken=frozenset(self._receiver.taken),
                killed=frozenset(self._killed),
            )
            calls = read_calls(self._folder / "calls")
            async with self._store.open() as store:
                findings += await judge(told, calls, store)
            findings += await self._store.close()
        results = [session.result for view in readers[READERS[0]] for session in view.sessions if session.result]
        return RunReport(
            seed=self._seed,
            fleet=self._fleet,
            seconds=round(ended - begun, 1),
            groups=sum(1 for ids in self._accepted.values() if ids),
            kills=self._kills,
            faults=[f"{fault.kind} at {fault.at:.2f}" for fault in self._faults],
            left_out=self._left_out,
            endings=dict(Counter(one.error.code if one.error else one.stop_reason.value for one in results)),
            attempts=sum(one.attempt for one in results),
            turns=sum(one.turns for one in results),
            grown=self._grown,
            findings=findings,
            folder=None,
        )

    async def _start(self, service: int, engine: int, tasks: asyncio.TaskGroup) -> None:
        if self._cluster is None:
            self._store = SqliteUnderTest(self._folder / "data")
        else:
            self._store = await self._cluster.new_database(f"run_{self._seed}")
        self._url = f"http://127.0.0.1:{service}"
        knobs = str(self._folder / "knobs")
        self._engine = self._a_program("campaign.engine", str(self._folder / "calls"), str(engine), knobs)
        processes, elsewhere = str(self._fleet.processes), "elsewhere" * self._fleet.elsewhere
        arguments = (str(self._folder), str(service), self._proxy.url, self._store.url, processes, elsewhere)
        self._service = self._a_program(self._program, *arguments)
        crashing = self._folder / f"{READERS[1]}.sqlite3"
        self._crashing = self._a_program("campaign.reader", self._url, str(crashing))
        await self._engine.start(tasks)
        await _listening(engine)
        await self._service.start(tasks)
        await _listening(service)
        await self._store.watch_turns()
        await self._crashing.start(tasks)
        for machine in self._machines:
            await machine.program.start(tasks)

    def _a_program(self, module: str, *arguments: str) -> Program:
        name = "service" if module == self._program else module.rpartition(".")[2]
        log = self._folder / f"{name}.log"
        return Program(self._starter, module, arguments, log=log, temporary=self._temporary)

    async def _drive(self, tasks: asyncio.TaskGroup) -> list[Finding]:
        """Submit, inject faults, cancel and read until all groups are delivered and all faults are over."""
        runtime = "namespace" if NamespaceRuntime.available().ok else "memory"
        groups = draw_groups(self._rng, self._count, runtime=runtime, callback=self._receiver.url)
        repeated = {number for number in range(self._count) if self._rng.random() < REPEATED}
        cancelled = [(self._rng.uniform(0.2, 0.9), random.Random(self._rng.random())) for _ in range(CANCELLED)]
        left = iter(enumerate(groups[:-1]))

        async def submit() -> None:
            for number, group in left:
                for _ in range(2 if number in repeated else 1):
                    await self._submit(group)

        reader = Reader(self._folder / f"{READERS[0]}.sqlite3")
        reading = tasks.create_task(reader.read(self._url))
        breaking = [tasks.create_task(self._break(fault)) for fault in self._faults]
        work: list[Coroutine[Any, Any, None]] = [submit() for _ in range(SUBMITTERS)]
        work += [self._cancel(at, rng) for at, rng in cancelled]
        work += [self._submit_last(groups[-1], breaking)]
        doing = [*breaking, *(tasks.create_task(each) for each in work)]
        findings = await self._watch(doing)
        for task in (*doing, reading):
            task.cancel()
        await asyncio.wait((reading,))
        reader.close()
        return findings

    async def _submit(self, group: dict[str, Any]) -> None:
        ids = self._accepted.setdefault(group["idempotency_key"], [])
        if (view := await self._answered(lambda: self._client.submit(group))) is not None:
            ids.append(view.id)
            if "callback_url" in group:
                self._with_callback.add(view.id)

    async def _submit_last(self, group: dict[str, Any], breaking: Sequence[asyncio.Task[None]]) -> None:
        """Submit a group after the last fault, and cancel it while it runs. No later service can remove resources that
        the last service leaks here."""
        await asyncio.wait(breaking)
        await self._submit(group)
        (id,) = self._accepted[group["idempotency_key"]]
        while (view := await self._answered(lambda: self._client.group(id))) is not None:
            if any(session.state is SessionState.RUNNING for session in view.sessions):
                await self._answered(lambda: self._client.cancel(id))
                return
            if view.state is GroupState.DONE:
                return

    async def _cancel(self, at: float, rng: random.Random) -> None:
        """Cancel a group with a running session, if there is one."""
        await self._progress.until(at)
        accepted = [ids[0] for ids in self._accepted.values() if ids]
        for group in rng.sample(accepted, k=len(accepted)):
            view = await self._answered(lambda group=group: self._client.group(group))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            if view is not None and any(session.state is SessionState.RUNNING for session in view.sessions):
                await self._answered(lambda group=group: self._client.cancel(group))  # type: ignore[misc]  # as above
                return

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat the call until the service is up, and return its reply. Returns None for a lost group, which the
        checks report."""
        while True:
            try:
                return await call()
            except NotFound:
                return None
            except ServiceError:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _watch(self, doing: list[asyncio.Task[None]]) -> list[Finding]:
        """Watch the progress until everything is delivered. Returns at once if a group is certainly lost."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._nodes |= await asyncio.to_thread(self._nodes_now)
            for task in doing:
                if task.done():
                    task.result()
            delivered = [{view.id: view.cursor or 0 for view in self._read(name)} for name in READERS]
            accepted = {ids[0] for ids in self._accepted.values() if ids}
            both = delivered[0].keys() & delivered[1].keys() & accepted
            pushed = self._with_callback <= self._receiver.taken
            await self._progress.set(accepted=len(accepted), delivered=len(both))
            if self._breaking:
                self._progress.moved = time.monotonic()
            idle = time.monotonic() - self._progress.moved
            if len(both) == self._count and pushed and all(task.done() for task in doing):
                return []
            read_to = min(max(given.values(), default=0) for given in delivered)
            if idle > IDLE_SECONDS and (lost := await self._lost(accepted - both, read_to)):
                return lost
            if idle > STALL_SECONDS:
                return [Finding(Harm.LOST, f"nothing was delivered for {STALL_SECONDS:.0f} s")]

    async def _lost(self, waiting: set[str], read_to: int) -> list[Finding]:
        """Return a finding for each accepted group that the service no longer has, or whose cursor both readers have
        passed."""
        lost = []
        for group in sorted(waiting):
            try:
                cursor = (await self._client.group(group)).cursor
                if cursor is not None and cursor < read_to:
                    lost.append(Finding(Harm.LOST, f"{group} is done at {cursor}: the readers are at {read_to}"))
            except NotFound:
                lost.append(Finding(Harm.LOST, f"{group} was accepted, and is not known any more"))
            except OutriderError:
                break  # the service is down: the next check tries again
        return lost

    async def _break(self, fault: Fault) -> None:
        await self._progress.until(fault.at)
        await asyncio.sleep(fault.seconds / 4)
        self._breaking += 1
        if fault.kind in ON_MACHINES:
            await self._break_machine(fault)
        elif fault.kind in SILENCES:
            await self._until_busy()
            await self._silence(fault)
        else:
            await self._break_here(fault)
        self._breaking -= 1
        self._progress.moved = time.monotonic()  # the wait for a stall begins anew

    async def _break_machine(self, fault: Fault) -> None:
        number, directions = divmod(int(fault.share * len(self._machines) * len(DIRECTIONS)), len(DIRECTIONS))
        machine = self._machines[number]
        await self._until_busy(machine)
        match fault.kind:
            case FaultKind.MACHINE_KILLED:
                self._kills += await asyncio.to_thread(machine.kill)
            case FaultKind.MACHINE_STOPPED:
                machine.program.signal(signal.SIGTERM)
            case FaultKind.MACHINE_ENDED:
                await asyncio.to_thread(machine.end)
            case FaultKind.CONNECTION_CUT:
                for _ in range(1 + int(fault.share * MOST_CUTS)):
                    machine.proxy.cut()
                    await asyncio.sleep(CUT_PAUSE_SECONDS * fault.seconds)
            case FaultKind.CONNECTION_SLOW:
                await machine.proxy.hold(SLOW * fault.seconds, DIRECTIONS[directions])
            case FaultKind.CONNECTION_SILENT:
                await machine.proxy.hold(SILENT_SECONDS + SLOW * fault.seconds, DIRECTIONS[directions])

    async def _silence(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.ENGINE_FROZEN:
                self._engine.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.long)
                self._engine.signal(signal.SIGCONT)
            case FaultKind.ENGINE_SILENT:
                self._knobs.engine_silent = True
                await asyncio.sleep(fault.long)
                self._knobs.engine_silent = False
            case FaultKind.ENGINE_DRIPS:
                self._knobs.chunk_seconds = DRIP_SECONDS
                await asyncio.sleep(fault.long)
                self._knobs.chunk_seconds = 0.0
            case FaultKind.ENGINE_LOST:
                self._proxy.lose()
            case FaultKind.ENGINE_ODD:
                await self._proxy.answer(fault.seconds)
            case FaultKind.STORE_SILENT if self._cluster is None:
                self._knobs.commit_seconds = fault.outage
                await asyncio.sleep(FIRST_COMMIT_SECONDS)
                self._knobs.commit_seconds = 0.0
                await asyncio.sleep(fault.outage)
            case FaultKind.STORE_SILENT:
                assert self._cluster is not None
                await self._cluster.freeze(fault.outage)
            case FaultKind.STORE_AWAY:
                assert self._cluster is not None
                self._kills += 1
                await self._cluster.restart(signal.SIGKILL, away=fault.outage)

    async def _break_here(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.SERVICE_KILLED:
                self._kill(self._service)
            case FaultKind.SERVICE_STOPPED:
                self._service.signal(signal.SIGTERM)
            case FaultKind.ENGINE_KILLED:
                self._kill(self._engine)
            case FaultKind.ENGINE_HUNG:
                self._engine.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                if fault.share < 0.5:
                    self._kill(self._engine)
                else:
                    self._engine.signal(signal.SIGCONT)
            case FaultKind.NODE_KILLED:
                await self._until_busy()
                if nodes := await asyncio.to_thread(self._nodes_now):
                    with suppress(ProcessLookupError):
                        os.kill(self._rng.choice(sorted(nodes)), signal.SIGKILL)
                        self._kills += 1
            case FaultKind.AGENTS_KILLED:
                await self._until_busy()
                await asyncio.to_thread(self._kill_agents, fault.share)
            case FaultKind.READER_KILLED:
                self._kill(self._crashing)
            case FaultKind.DISK_FULL:
                if not self._disk:
                    self._left_out.append(fault.kind)
                    return
                with self._disk.full():
                    await asyncio.sleep(fault.seconds)
            case FaultKind.POWER_LOST:
                if not self._disk:
                    self._left_out.append(fault.kind)
                    return
                async with self._service.down() as killed:
                    self._kills += killed
                    await asyncio.to_thread(self._disk.lose_power)
            case FaultKind.DISK_SLOW:
                self._knobs.commit_seconds = FULLEST_COMMIT * fault.share
                await asyncio.sleep(fault.seconds)
                self._knobs.commit_seconds = 0.0
            case FaultKind.CLOCK_JUMPED:
                self._knobs.clock_offset = (LEAST_JUMP + DAY * fault.share) * (-1 if fault.share < 0.5 else 1)
                await asyncio.sleep(fault.seconds)
                self._knobs.clock_offset = 0.0
            case FaultKind.DATABASE_KILLED | FaultKind.DATABASE_STOPPED:
                assert self._cluster is not None
                killed = fault.kind is FaultKind.DATABASE_KILLED
                await self._cluster.restart(signal.SIGKILL if killed else signal.SIGINT)
                self._kills += killed
            case FaultKind.LEASES_LAPSED:
                await self._until_busy()
                self._service.signal(signal.SIGUSR1)

    def _kill(self, program: Program) -> None:
        self._kills += program.signal(signal.SIGKILL)

    async def _until_busy(self, machine: Machine | None = None) -> None:
        """Wait until some sessions run or, with `machine`, until one session runs on it. Gives up after a while,
        because all sessions may have ended."""
        for _ in range(BUSY_LOOKS if machine is None else MACHINE_LOOKS):
            status = await self._answered(self._client.status)
            assert status is not None
            running = {node.name: node.sessions for node in status.nodes}
            if machine is None:
                busy = sum(running.values()) >= BUSY_SESSIONS
            else:
                busy = any(running.get(node) for node in machine.nodes) or self._progress.all_but_last
            if busy:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _nodes_now(self) -> set[int]:
        """Return the processes that run sessions, without the service's main process."""
        if not self._fleet.several:
            return set()
        return leaks.nodes_of(self._service.pid, *(machine.program.pid for machine in self._machines))

    def _homes(self) -> list[leaks.Home]:
        joined = [leaks.Home(machine.temporary, machine.processes, joined=True) for machine in self._machines]
        return [leaks.Home(self._temporary, self._fleet.processes), *joined]

    def _kill_agents(self, share: float) -> None:
        """Kill processes in sandboxes: agents, their children, and the sandboxes' own processes. On each node,
        one process is killed, and in addition `share` / 4 of all processes."""
        for folder in (folder for home in self._homes() for folder in home.temporary.iterdir()):
            sandboxes = (each for each in sorted(folder.glob("s-*")) if each.is_dir())
            marked = [
                (pid, each.name) for each in sandboxes for pid in process_marks.marked(f"{folder.name}/{each.name}")
            ]
            for pid, sandbox in self._rng.sample(marked, k=min(len(marked), 1 + int(len(marked) * share / 4))):
                self._killed.add(sandbox)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._kills += 1

    async def _stop(self) -> list[Finding]:
        """Stop all programs, beginning with the service and the machines while they are idle. Returns a finding for
        each resource that they hold or leave."""
        findings = [Finding(Harm.LOST, f"{node} is not there again") for node in sorted(await self._until_complete())]
        for machine in self._machines:
            codes = map(os.waitstatus_to_exitcode, machine.program.statuses)
            findings += [Finding(Harm.LOST, f"{machine.name} left with {code}") for code in codes if code > 0]
        # An attempt whose lease has lapsed may wait for a lost connection. That wait is half a minute longer than the
        # search for leaks, so the connections are cut.
        self._proxy.cut()
        findings += await leaks.held_by_idle_service(self._client, self._homes())
        after = leaks.footprint(self._service.pid)
        if after is not None:  # a service that has ended is already in the findings
            self._grown = (round(after.mib, 1), after.descriptors)
        hosts = {machine.name: machine.program for machine in self._machines}
        service = {"the service": self._service}
        for name, program in (hosts | service if self._machines_leave else service | hosts).items():
            if not await program.stop():
                findings.append(Finding(Harm.LEAKED, f"{name} did not stop"))
        for program in (self._crashing, self._engine):
            await program.stop()
        pids = {*self._service.pids, *self._nodes}
        return findings + await leaks.left_behind(self._starter.pid, self._folder, self._homes(), pids)

    async def _until_complete(self) -> set[str]:
        """Wait for the service and for all nodes, its own and those of machines, and return the missing ones. The
        remains of a killed node are removed only when a node starts, so all nodes must have started before the search
        for leaks."""
        nodes = {node for machine in self._machines for node in machine.nodes}
        missing = {"the service"}
        with suppress(TimeoutError):
            async with asyncio.timeout(JOIN_SECONDS):
                while missing:
                    status = await self._answered(self._client.status)
                    assert status is not None
                    here = {node.name for node in status.nodes if node.capacity}
                    missing = (nodes | {node.name for node in status.nodes}) - here
                    await asyncio.sleep(LOOK_SECONDS)
        return missing

    def _read(self, name: str) -> list[GroupView]:
        if name not in self._views:
            self._views[name] = Reader(self._folder / f"{name}.sqlite3")
        return self._views[name].groups()


def free_port() -> int:
    """Return a port outside the kernel's range for outgoing connections, because a restarted program must find its port
    free. The port is not drawn from the seed, because two campaigns with one seed may run at the same time."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def _listening(port: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
