"""Sessions in several processes: with engines of each kind, through pauses of the policy, and when processes die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from outrider.config import CallbacksConfig, Config, FrozenConfig, SandboxesConfig
from outrider.counts import Distribution
from outrider.engines.base import ChatChunk, ChatRequest, EngineHealth
from outrider.errors import ServiceError
from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lab.fakes.engine_servers.prefix_cache import PrefixCache
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.nodes import pool_publisher, processes, spawning
from outrider.nodes.remote_node import WAITS, NodeWaits
from outrider.schemas import GroupView, SessionView
from outrider.sessions.resources import Capacity
from outrider.spec import EngineSpec, PolicyUpdateSpec
from outrider.trajectory import FinishReason, LogprobKind, Sample, SessionResult, TokenMode
from outrider.wire.pipe import Pipe
from support.stamping import StampingEngine

from .conftest import Starts

SAY = "hello<|im_end|>"
SECRET = "aGlkZGVuLWhpZGRlbi1oaWRkZW4taGlkZGVu"
SESSIONS = 48
LENGTH = 24


def result_of(session: SessionView) -> SessionResult:
    assert session.result is not None
    return session.result


def ends(view: GroupView) -> Counter[StopReason]:
    for session in view.sessions:  # pytest prints this if the test fails
        print(session.id, session.node, session.attempt, result_of(session).error)
    return Counter(result_of(session).stop_reason for session in view.sessions)


def node_processes() -> set[int]:
    """Return the ids of the node processes below this one."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
                if b"outrider.cli.node_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


def process_of(view: GroupView) -> set[int]:
    verdicts = (result_of(session).verdict for session in view.sessions)
    return {int(verdict.metrics["process"]) for verdict in verdicts if verdict is not None}


@asynccontextmanager
async def served(engine: Any, protocol: Any = "vllm", **settings: Any) -> AsyncIterator[str]:
    """Yield the URL at which an engine is served with the protocol of an inference server."""
    async with serving(engine_app(engine, protocol, ServeSettings(**settings))) as url:
        yield url


def replies_of(sample: Sample, engine: StampingEngine) -> Iterator[list[int]]:
    """Yield the versions of each reply in a row. Checks that each sampled letter belongs to the version that the row
    gives, and that each log-probability belongs to its position."""
    reply: list[int] = []
    rows = zip(sample.ids, sample.loss_mask, sample.logprobs, sample.versions, strict=True)
    for place, (token, trains, logprob, version) in enumerate(rows):
        if trains:
            reply.append(version)
            assert logprob == scripted_logprob(place, token)
            assert token == engine.end or engine.letters.index(token) == version
        elif reply:
            yield reply
            reply = []
    if reply:
        yield reply


@pytest.mark.deep
async def test_sessions_run_in_both_processes_and_have_their_own_tokens(start: Starts, tokenizer: Path) -> None:
    engine = StampingEngine(tokenizer, length=LENGTH)
    async with start() as running:
        await running.service.pool.add_engine(engine)
        async with asyncio.timeout(60):
            while True:
                view = await running.done(await running.submit("ask", "ask", n=16))
                assert ends(view) == {StopReason.COMPLETED: 16}
                if process_of(view) == node_processes():  # a process that gets no CPU time for a while gets no session
                    break
        assert [result_of(session).verdict.reward for session in view.sessions] == [2.0] * 16  # type: ignore[union-attr]
        assert os.getpid() not in process_of(view)
        assert {session.node for session in view.sessions} == {"local-0", "local-1"}
        replies = [reply for sample in view.samples or () for reply in replies_of(sample, engine)]
        assert [len(reply) for reply in replies] == [LENGTH + 1] * 32
        assert sum(result_of(session).tokens.drift for session in view.sessions) == 0
        sampled = 32 * (LENGTH + 1)
        async with asyncio.timeout(10):  # nodes report their use of engines a moment later
            while any(  # noqa: ASYNC110
                status.in_flight or status.sessions or status.generated_tokens < sampled
                for status in running.service.engines()
            ):
                await asyncio.sleep(0.01)
        assert running.service.engines()[0].generated_tokens == sampled
        values = {(value.family, value.labels): value.value for value in await running.service.metrics.read()}
        started = values["outrider_sandbox_start_seconds", ("memory",)]
        assert isinstance(started, Distribution)
        assert sum(started.counts) == 16
        assert values["outrider_sampled_tokens", ("policy",)] == sampled
        assert values["outrider_engine_calls", (engine.name,)] == 32
        assert sum(values["outrider_lane_served", (name, "run")] for name in ("local-0", "local-1")) == 16  # type: ignore[misc]
    assert node_processes() == set()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("forwarded", "weights"),
    [(True, "weights"), (False, None)],  # the stamping engine's server cannot load weights
    ids=["forwarded, which loads them", "vllm, into which the trainer loads them"],
)
@pytest.mark.parametrize("mode", ["finish", "abort"])
async def test_updates_in_the_middle_of_sessions(
    start: Starts, tokenizer: Path, mode: Any, weights: str | None, forwarded: bool
) -> None:
    engines = [StampingEngine(tokenizer, name=f"engine-{number}", length=LENGTH) for number in range(2)]
    caches = [PrefixCache() for _ in engines]
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(start())
        for engine, cache in zip(engines, caches, strict=True):
            if forwarded:
                await running.service.pool.add_engine(engine)
            else:
                url = await stack.enter_async_context(served(engine, dev_mode=True, prefix_cache=cache))
                await running.service.add_engine(EngineSpec(kind="vllm", name=engine.name, url=url))
        # Three model calls, because each update may find all sessions in the same call.
        submitted = await running.submit("ask", "ask", "ask", n=SESSIONS, limits={"agent_seconds": 300})
        for version in (1, 2):
            for engine in engines:
                engine.hold(6 * SESSIONS // 2)
            for engine in engines:
                await engine.held.wait()
            update = asyncio.ensure_future(
                running.service.update_policy(PolicyUpdateSpec(version=version, mode=mode, weights=weights))
            )
            if mode == "finish":
                for engine in engines:
                    engine.release()
            status = await update
            assert [each.version for each in status.engines] == [version, version]
        for engine in engines:
            engine.release()
        # Only the service sets the engines' versions: some servers refuse this while they generate.
        assert [engine.told.count("set_version") for engine in engines] == [2, 2]
        view = await running.done(submitted)
        assert ends(view) == {StopReason.COMPLETED: SESSIONS}
        assert {session.attempt for session in view.sessions} == {1}
        replies = [reply for sample in view.samples or () for reply in replies_of(sample, engines[0])]
        assert [len(reply) for reply in replies] == [LENGTH + 1] * SESSIONS * 3
        assert {version for reply in replies for version in reply} >= {0, 1, 2}
        assert all(reply == sorted(reply) for reply in replies)
        assert any(len(set(reply)) > 1 for reply in replies) == (mode == "abort")
        assert sum(result_of(session).tokens.drift for session in view.sessions) == 0
        if not forwarded:  # both processes use the same salt for a version
            assert [(cache.stale, len(set(cache.salts))) for cache in caches] == [(0, 3)] * 2


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_sessions_of_a_process_that_dies_or_hangs_run_again(
    start: Starts, tokenizer: Path, number: int
) -> None:
    waits = NodeWaits(silence=4.0, heartbeat=0.2) if number == signal.SIGSTOP else WAITS
    async with start(waits=waits) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        submitted, nodes = await running.at_door_on_both_nodes(8)
        killed = min(node_processes())
        os.kill(killed, number)
        async with asyncio.timeout(60):
            while killed in node_processes():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.open("door")
        view = await running.done(submitted)
        assert ends(view) == {StopReason.COMPLETED: 8}
        ran_again = {session.id for session in view.sessions if session.attempt == 2}
        assert {session.attempt for session in view.sessions} == {1, 2}
        assert ran_again in [{each for each in nodes if nodes[each] == node} for node in set(nodes.values())]
        assert [sample.rows for sample in view.samples or ()] == [1] * 8
        again = await running.done(await running.submit("ask", n=16))
        async with asyncio.timeout(30):  # the process was started again
            while len(process_of(again)) < 2:
                await asyncio.sleep(0.1)
                again = await running.done(await running.submit("ask", n=16))
        assert killed not in process_of(again)
        assert len(node_processes()) == 2


@pytest.mark.deep
async def test_an_agent_that_kills_its_process_ends_in_an_error_and_no_other_session_does(
    start: Starts, tokenizer: Path
) -> None:
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        deadly = await running.submit("exit")
        view = await running.done(deadly)
        assert ends(view) == {StopReason.ERROR: 1}
        assert result_of(view.sessions[0]).error.code == "lease_expired"  # type: ignore[union-attr]
        assert ends(await running.done(await running.submit("ask", n=8))) == {StopReason.COMPLETED: 8}


@pytest.mark.deep
async def test_time_in_which_the_service_stood_still_is_charged_to_no_session(start: Starts, tokenizer: Path) -> None:
    """The agents run in other processes and need the service for every call. An attempt whose time limit passes because
    of the stall is not graded, but run again."""
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        patient = await running.submit("ask", "wait door", "ask", n=2, limits={"agent_seconds": 4})
        await running.here("door")
        hasty = await running.submit("ask", "wait never", limits={"agent_seconds": 4})
        await running.here("never")
        time.sleep(5)  # noqa: ASYNC251  # blocks the event loop, in which the service runs
        running.open("door")
        assert ends(await running.done(patient)) == {StopReason.COMPLETED: 2}
        view = await running.done(hasty)
        assert ends(view) == {StopReason.AGENT_TIMEOUT: 1}
        assert view.sessions[0].attempt == 2
        assert "stood still" in view.sessions[0].last_error.message  # type: ignore[union-attr]


@pytest.mark.deep
async def test_cancelled_sessions_are_torn_down_in_their_process(start: Starts, tokenizer: Path) -> None:
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        submitted = await running.submit("ask", "wait never", n=4)
        await running.here("never")
        await running.service.cancel(submitted.id)
        view = await running.done(submitted)
        assert ends(view) == {StopReason.CANCELLED: 4}
        async with asyncio.timeout(10):
            while any(node.stats().sessions for node in running.nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.deep
async def test_sessions_that_are_cancelled_as_they_start_end(start: Starts, tokenizer: Path) -> None:
    """A node may receive the cancellation of an attempt before the attempt has begun to run."""
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        submitted = [await running.submit("ask", "wait never", n=8) for _ in range(8)]
        for group in submitted:
            await asyncio.sleep(0.002)
            await running.service.cancel(group.id)
        for group in submitted:
            assert ends(await running.done(group)) == {StopReason.CANCELLED: 8}
        assert ends(await running.done(await running.submit("ask", n=8))) == {StopReason.COMPLETED: 8}


@pytest.mark.deep
async def test_a_version_that_is_told_without_a_pause_is_known_everywhere(start: Starts, tokenizer: Path) -> None:
    """`resume` is called without a pause, as after a service died while it was paused. The engine's server reports no
    versions."""
    engine = StampingEngine(tokenizer, length=4, labels=False)
    async with start() as running, served(engine, dev_mode=False) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="served", url=url))
        await running.done(await running.submit("ask", n=4))
        engine.version = 7
        await running.service.pool.policy.resume(7)
        versions: set[int] = set()
        async with asyncio.timeout(30):  # the followers get the version a moment later
            while versions != {-1, 7}:
                view = await running.done(await running.submit("ask", n=4))
                versions = {version for sample in view.samples or () for version in sample.versions}


@pytest.mark.deep
async def test_what_the_service_says_of_a_forwarded_engine_is_heeded(start: Starts, tokenizer: Path) -> None:
    """Such a change occurs with a relay, whose worker may connect after the engine was added."""
    engine = StampingEngine(tokenizer, length=4)
    async with start() as running:
        await running.service.pool.add_engine(engine)
        await running.done(await running.submit("ask"))
        engine.logprob_kind = LogprobKind.RAW
        running.service.pool.changes.publish(None)
        kind = LogprobKind.SAMPLING
        async with asyncio.timeout(30):  # the followers get the change a moment later
            while kind is not LogprobKind.RAW:
                view = await running.done(await running.submit("ask"))
                (turn,) = await running.service.store.turns(view.sessions[0].id)
                kind = turn.logprob_kind


@pytest.mark.deep
async def test_a_process_keeps_its_artifacts_itself(start: Starts, tokenizer: Path) -> None:
    """The service accepts the result's number of bytes, although it has not received the bytes."""
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        view = await running.done(await running.submit("ask", "write kept.txt", artifacts=["kept.txt"]))
        assert ends(view) == {StopReason.COMPLETED: 1}
        assert view.sessions[0].attempt == 1
        assert result_of(view.sessions[0]).artifact_bytes == 6
        assert running.service.nodes().refused == ()


@pytest.mark.deep
async def test_a_result_that_cannot_be_sent_ends_its_session_alone(start: Starts, tokenizer: Path) -> None:
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        before = node_processes()
        view = await running.done(await running.submit("ask", "leave with 2**70"))
        assert ends(view) == {StopReason.ERROR: 1}
        assert "cannot be sent" in result_of(view.sessions[0]).error.message  # type: ignore[union-attr]
        assert node_processes() == before


@pytest.mark.deep
async def test_a_node_that_cannot_start_again_is_tried_again(start: Starts, tokenizer: Path) -> None:
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        hidden = str(tokenizer) + "-hidden"
        os.rename(tokenizer, hidden)
        before = node_processes()
        os.kill(min(before), signal.SIGKILL)
        await asyncio.sleep(4)
        assert ends(await running.done(await running.submit("ask", n=4))) == {StopReason.COMPLETED: 4}
        os.rename(hidden, tokenizer)
        async with asyncio.timeout(60):
            while sum(node.stats().capacity > 0 for node in running.nodes) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.deep
async def test_all_processes_share_the_machines_resources(start: Starts, tokenizer: Path) -> None:
    async with start(sandboxes=SandboxesConfig(cpus=2.0)) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        needs = {"resources": {"cpus": 1.0}}
        view = await running.done(await running.submit("ask", "hold times 0.2", n=8, runtime=needs))
        assert ends(view) == {StopReason.COMPLETED: 8}
        assert len(process_of(view)) == 2
        lines = [line.split() for line in (running.folder / "times").read_text().splitlines()]
        edges = sorted([(float(began), 1) for _, began, _ in lines] + [(float(ended), -1) for _, _, ended in lines])
        at_once = most = 0
        for _, change in edges:
            at_once += change
            most = max(most, at_once)
        assert (len(lines), most) == (8, 2)
        assert {node.stats().resources.cpus_set_aside for node in running.nodes} == {0.0}


def some_gpus(number: int) -> tuple[str, ...]:
    """Return names that contain this process's id: tests that run on this machine at the same time use other names."""
    return tuple(f"{os.getpid()}-{each}" for each in range(number))


@pytest.mark.deep
async def test_no_gpu_is_used_by_two_sessions_whichever_process_they_are_in(start: Starts, tokenizer: Path) -> None:
    gpus = some_gpus(3)
    async with start(sandboxes=SandboxesConfig(gpus=gpus)) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        groups = [
            await running.submit("ask", "use times 0.2", n=6, runtime={"resources": {"gpus": number}})
            for number in (1, 2, 3)
        ]
        views = [await running.done(group) for group in groups]
        assert [ends(view) for view in views] == [{StopReason.COMPLETED: 6}] * 3
        assert len({process for view in views for process in process_of(view)}) == 2
        uses = [line.split() for line in (running.folder / "times").read_text().splitlines()]
        assert len(uses) == 18
        for name in gpus:
            spans = sorted((float(began), float(ended)) for had, began, ended in uses if name in had.split(","))
            assert len(spans) >= 6
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
        resources = [node.stats().resources for node in running.nodes]
        assert {(each.gpus, each.gpus_set_aside, each.waiting) for each in resources} == {(3, 0, 0)}


@pytest.mark.deep
async def test_the_gpus_of_a_process_that_dies_are_given_to_the_next(start: Starts, tokenizer: Path) -> None:
    gpus = some_gpus(2)
    async with start(sandboxes=SandboxesConfig(gpus=gpus)) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        submitted = await running.submit("ask", "wait door", "use times 0", runtime={"resources": {"gpus": 2}})
        await running.here("door")
        assert [node.stats().resources.gpus_set_aside for node in running.nodes] == [2, 2], "one account"
        (running.folder / "door.here").unlink()
        for process in node_processes():
            os.kill(process, signal.SIGKILL)
        await running.here("door")
        running.open("door")
        view = await running.done(submitted)
        assert ends(view) == {StopReason.COMPLETED: 1}
        assert view.sessions[0].attempt in (2, 3), "of two that die, one may be given it before its end is seen"
        assert (running.folder / "times").read_text().split()[0] == ",".join(gpus)
        async with asyncio.timeout(30):
            while any(node.stats().resources.gpus_set_aside for node in running.nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.deep
async def test_new_sessions_go_to_the_engine_with_least_load_in_all_processes(start: Starts, tokenizer: Path) -> None:
    engines = [StampingEngine(tokenizer, name=f"engine-{number}", length=4) for number in range(4)]
    async with start(processes=4) as running:
        for engine in engines:
            await running.service.pool.add_engine(engine)
        for number in range(16):  # one at a time; each process has started only some of the sessions
            submitted = await running.submit("ask", f"wait done-{number}")
            await running.here(f"done-{number}")
            async with asyncio.timeout(30):
                while sum(status.sessions for status in running.service.engines()) <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(4 * pool_publisher.LOADS_SECONDS)  # until all processes have the engines' loads
            assert max(status.sessions for status in running.service.engines()) <= number // 4 + 1
        for number in range(16):
            running.open(f"done-{number}")
        await running.done(submitted)


@pytest.mark.deep
async def test_an_engine_that_fails_in_a_process_is_looked_at_and_found_again(start: Starts, tokenizer: Path) -> None:
    engine = StampingEngine(tokenizer, length=4)
    async with start() as running, AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(engine))
        await running.service.add_engine(EngineSpec(kind="vllm", name="served", url=url))
        assert ends(await running.done(await running.submit("ask", n=4))) == {StopReason.COMPLETED: 4}
        await stack.aclose()  # the engine's server ends
        submitted = await running.submit("ask", n=4)
        async with asyncio.timeout(30):
            while running.service.engines()[0].ok:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with serving(engine_app(engine), port=int(url.rpartition(":")[2])):
            assert ends(await running.done(submitted)) == {StopReason.COMPLETED: 4}
            assert running.service.engines()[0].ok


@pytest.mark.deep
async def test_engines_come_and_go_while_sessions_run(start: Starts, tokenizer: Path) -> None:
    first, second = (StampingEngine(tokenizer, name=name, length=4) for name in ("first", "second"))
    async with start() as running, served(second) as url:
        await running.service.pool.add_engine(first)
        submitted = await running.submit("ask", "wait door", "ask", n=8)
        await running.here("door")
        await running.service.add_engine(EngineSpec(kind="vllm", name="second", url=url))
        await running.service.pool.remove("first")
        asked = len(first.requests)
        running.open("door")
        assert ends(await running.done(submitted)) == {StopReason.COMPLETED: 8}
        assert len(first.requests) == asked
        assert len(second.requests) >= 8
        await running.service.pool.remove("second")
        await running.service.add_engine(EngineSpec(kind="vllm", name="second", url=url))
        assert ends(await running.done(await running.submit("ask", n=8))) == {StopReason.COMPLETED: 8}


class Words:
    """`ChatEngine` that gives every caller the same reply."""

    name = "words"
    mode = TokenMode.TEXT
    logprob_kind = LogprobKind.NONE

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        yield ChatChunk(text="it is ")
        reply = Message(role=Role.ASSISTANT, content="it is worth 7")
        yield ChatChunk(text="worth 7", finish=FinishReason.STOP, reply=reply)


@pytest.mark.deep
async def test_a_frozen_model_on_an_engine_that_takes_messages(start: Starts, tokenizer: Path) -> None:
    async with start(frozen=(FrozenConfig(name="judge"),)) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        await running.service._frozen["judge"].add_engine(Words())
        view = await running.done(await running.submit("ask", "consult judge", n=4))
        assert ends(view) == {StopReason.COMPLETED: 4}
        assert [result_of(session).frozen["judge"].turns for session in view.sessions] == [1] * 4
        turns = await running.service.reader.turns(view.sessions[0].id)
        assert [turn.sampled for turn in turns if turn.model == "judge"] == ["it is worth 7"]


@pytest.mark.deep
async def test_a_stopped_service_leaves_its_sessions_to_the_next(start: Starts, tokenizer: Path) -> None:
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        submitted = await running.submit("ask", "wait door", n=6)
        await running.here("door")
    assert node_processes() == set()
    running.open("door")
    async with start() as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=4))
        assert ends(await running.done(submitted)) == {StopReason.COMPLETED: 6}


async def test_a_process_that_cannot_start_keeps_the_service_from_starting(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that starts with this variable does not find Python's own modules.
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with pytest.raises(ServiceError, match="before it was ready"):
        async with start():
            pass
    assert node_processes() == set()


async def test_every_call_of_end_returns_when_the_process_is_gone() -> None:
    ours, theirs = socket.socketpair()
    pipe = await Pipe.over(ours, 1 << 20)
    with theirs:
        program = await asyncio.create_subprocess_exec("cat", stdin=theirs.fileno(), start_new_session=True)
    process = spawning.NodeProcess(program, pipe)

    async def ended() -> int | None:
        await process.end()
        return process.exit_code

    first, second = await asyncio.gather(ended(), ended())
    assert (first, second) == (0, 0)
    assert await ended() == 0


def test_a_process_is_told_no_secret_and_its_part_of_the_slots() -> None:
    config = Config(
        processes=3,
        sandboxes=SandboxesConfig(warm=2, warm_memory_mb=17),
        token="hidden-token",
        store="postgresql://user:hidden-password@host/name",
        callbacks=CallbacksConfig(secret=SecretStr(f"whsec_{SECRET}")),
        engines=(EngineSpec(kind="vllm", url="http://127.0.0.1:1", options={"api_key": "hidden-key"}),),
    )
    capacity = Capacity(cpus=4.0, memory_mb=100)
    setups = [processes.setup_of(config, f"n-{number}", number, capacity) for number in range(3)]
    assert all(word not in setup.config for setup in setups for word in (b"hidden", SECRET.encode()))
    configs = [Config.model_validate_json(setup.config) for setup in setups]
    assert [(each.sandboxes.warm, each.sandboxes.warm_memory_mb) for each in configs] == [(1, 16), (1, 16), (0, 16)]
    lanes = [each.lanes for each in configs]
    assert [each.run for each in lanes] == [22, 21, 21]
    assert [each.init for each in lanes] == [6, 5, 5]
