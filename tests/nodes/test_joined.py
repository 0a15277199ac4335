"""Nodes on other machines: joining, lost connections, and the end of a node or of the service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import pytest

from outrider.config import Config, LanesConfig, ModelConfig, SandboxesConfig
from outrider.counts import Distribution
from outrider.engines.base import EngineOptions
from outrider.engines.pool.leader import pool_state
from outrider.errors import Conflict, Forbidden, InvalidField, NotFound, Unauthorized
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import StopReason
from outrider.nodes import joined, remote_node
from outrider.nodes.joined_settings import _copies, settings_for_node
from outrider.nodes.joining import JoiningMachine
from outrider.nodes.messages import NodeHello, Ready
from outrider.nodes.pool_publisher import PoolPublisher
from outrider.nodes.remote_node import NodeWaits, ServiceParts, _without_local
from outrider.service.admission import validate_group
from outrider.sessions.resources import Capacity, NodeResources
from outrider.spec import EngineSpec, EvaluatorSpec, RegradeSpec, TokenSpec
from outrider.tokens.rendering.image_grids import read_image_settings
from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import Close, encode
from outrider.wire.resumable import HEADER
from support.relay import CuttingProxy
from support.service import say
from support.stamping import StampingEngine
from support.vision import picture, task
from support.vision_model import write_vision_tokenizer

from .acts import GRADER
from .conftest import Running, Starts
from .test_processes import ends, node_processes, replies_of, result_of, served

LENGTH = 4
HEARD_OF = NodeWaits(silence=12.0)
"""A node counts as lost after 12 seconds without a message, three times the interval of its heartbeats."""
CAPACITY = Capacity(cpus=4.0, memory_mb=4096, gpus=(f"{os.getpid()}-far",))


class Machine:
    """A machine that joins a service. Its node processes are children of this process."""

    def __init__(self, name: str = "far") -> None:
        self.name = name
        self.joined = asyncio.Event()
        self.stop = asyncio.Event()
        self.left = asyncio.Event()

    @asynccontextmanager
    async def at(self, url: str, tmp_path: Path, *, token: str | None = None, **config: Any) -> AsyncIterator[None]:
        """The machine joins when the block begins, and ends with the block."""
        lanes = LanesConfig(init=16, run=64, eval=16)
        machine = JoiningMachine(
            Config(**{"data": tmp_path / "node", "files": tmp_path, "lanes": lanes, "processes": 1} | config),
            CAPACITY,
            url=url,
            token=token,
            ca=None,
            name=self.name,
            joined=lambda _: self.joined.set(),
        )

        async def stop() -> None:
            await self.stop.wait()

        async def run() -> None:
            await machine.run(stop, seconds=30)
            self.left.set()

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run())
            async with asyncio.timeout(60):
                await self.joined.wait()
            try:
                yield
            finally:
                running.cancel()


async def known(running: Running, *names: str) -> None:
    """Return when exactly these nodes have joined."""
    async with asyncio.timeout(60):
        while {node.name for node in running.service.nodes().nodes if node.capacity} != set(names):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.deep
async def test_a_machine_joins_and_runs_sessions(
    start: Starts, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    engine = StampingEngine(tokenizer, length=LENGTH)
    kept: dict[str, Any] = {
        "runtime": {"kind": "namespace", "prepare": [{"run": "printf kept > kept.txt; mkdir sub; ln -s /etc sub/out"}]},
        "artifacts": ["kept.txt", "missing"],
    }
    async with start(processes=0) as running, served(engine) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="near", url=url))
        submitted = await running.submit("ask", "ask", n=4, **kept)  # before there is a node
        async with Machine().at(running.url, tmp_path, processes=2):
            assert ends(await running.done(submitted)) == {StopReason.COMPLETED: 4}
            await known(running, "far-0", "far-1")
            view = await running.done(await running.submit("ask", "ask", n=4, **kept))
            assert {session.node for session in view.sessions} == {"far-0", "far-1"}
            processes = {node.name: node.resources for node in running.service.nodes().nodes}
            assert {(each.cpus, each.memory_mb, each.gpus) for each in processes.values()} == {(4.0, 4096, 1)}
            with_gpu = await running.submit("ask", "use gpus 0", runtime={"resources": {"gpus": 1}})
            assert ends(await running.done(with_gpu)) == {StopReason.COMPLETED: 1}
            assert (running.folder / "gpus").read_text().split()[0] == CAPACITY.gpus[0]
        replies = [reply for sample in view.samples or () for reply in replies_of(sample, engine)]
        assert [len(reply) for reply in replies] == [LENGTH + 1] * 8
        for session in view.sessions:
            listed = running.service.artifacts.listed(session.id)
            assert [(each.path, each.size) for each in listed.artifacts] == [("/work/kept.txt", 4)]
            assert [each.path for each in listed.left_out] == ["missing"]
            assert running.service.artifacts.file(session.id, "/work/kept.txt").read_bytes() == b"kept"
    assert node_processes() == set()


@pytest.mark.deep
async def test_sessions_of_a_machine_use_the_engine_near_it(
    start: Starts, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    one, two = (StampingEngine(tokenizer, length=LENGTH) for _ in range(2))
    async with start(processes=0) as running, served(one) as one_url, served(two) as two_url:
        for name, url in (("one", one_url), ("two", two_url)):
            await running.service.add_engine(EngineSpec(kind="vllm", name=name, url=url))
        for near in ("one", "two"):
            async with Machine(f"near-{near}").at(running.url, tmp_path, near=(near,)):
                view = await running.done(await running.submit("ask", n=6))
            turns = [await running.service.store.turns(session.id) for session in view.sessions]
            assert {turn.engine for session in turns for turn in session} == {near}


@pytest.mark.deep
@pytest.mark.parametrize("reachable", [True, False])
async def test_a_machine_has_images_read_by_the_engine_that_it_reaches(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    if reachable:  # as if other machines could reach the engine's address
        monkeypatch.setattr(remote_node, "_without_local", lambda state: state)
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    engine = ScriptedEngine(EngineOptions(name="e", tokenizer=str(folder), options={"replies": [say("one")] * 2}))
    model = ModelConfig(tokenizer=str(folder), renderer="qwen3-vl")
    looks = task("chat", [("look", [0]), ("and here", [1])])
    async with start(processes=0, model=model) as running, served(engine) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="sees", url=url))
        async with Machine().at(running.url, tmp_path):
            view = await running.done(await running.service.submit(validate_group({"task": looks})))
        if not reachable:
            [session] = view.sessions
            assert session.result is not None
            assert session.result.verdict is None
            assert not engine.requests
            assert "forwards no images" in str(session.result.error)
            return
        assert [session.last_error for session in view.sessions] == [None]
        [sample] = view.samples or ()
        assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 4, 6)]
        assert [len(request.images) for request in engine.requests] == [1, 2]
        for image, shown in zip(sample.images, (picture(64, 64, seed=0), picture(96, 64, seed=1)), strict=True):
            assert (await running.service.store.image(image.digest)).data == shown
    assert node_processes() == set()


@pytest.mark.deep
async def test_a_machine_grades_again_what_another_has_kept(start: Starts, tokenizer: Path, tmp_path: Path) -> None:
    files = EvaluatorSpec(kind="callable", path="nodes.acts:grade_files")
    kept: dict[str, Any] = {"evaluator": {"kind": "callable", "path": GRADER, "carry": ["answer"], "keep": True}}
    async with start(processes=0) as running, served(StampingEngine(tokenizer, length=LENGTH)) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="near", url=url))
        async with Machine("first").at(running.url, tmp_path):
            old = await running.done(await running.submit("ask", "write answer", n=2, **kept))
        async with Machine("second").at(running.url, tmp_path):
            again = await running.service.regrade_group(old.id, RegradeSpec(evaluator=files))
            view = await running.done(again)
    for session, before in zip(view.sessions, old.sessions, strict=True):
        result = result_of(session)
        assert (result.error, result.regrades, session.node) == (None, before.id, "second")
        assert result.verdict is not None
        assert result.verdict.reward == 6.0
    assert [sample.packed_ids for sample in view.samples or ()] == [sample.packed_ids for sample in old.samples or ()]
    assert node_processes() == set()


async def test_engines_of_this_machine_are_reached_through_it(start: Starts, tokenizer: Path) -> None:
    async with start(processes=0) as running, served(StampingEngine(tokenizer)) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="near", url=url))
        (engine,) = pool_state(running.service.pool).engines
        assert engine.spec is not None
        (elsewhere,) = _without_local(pool_state(running.service.pool)).engines
        assert (elsewhere.spec, elsewhere.url) == (None, url)


def test_a_node_elsewhere_reads_images_as_the_service_does(tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    (folder / "weights.bin").write_bytes(b"0")
    config = Config.model_validate({"model": {"tokenizer": str(folder), "renderer": "qwen3-vl"}})
    copies = _copies(settings_for_node(config, "far", CAPACITY).folders, tmp_path / "copies")
    copy = Path(copies[str(folder)])
    settings = read_image_settings(copy, "qwen3-vl", 1280)
    assert settings is not None
    assert settings == read_image_settings(folder, "qwen3-vl", 1280)
    assert not (copy / "weights.bin").exists()


def test_a_node_elsewhere_is_told_no_secret_and_gets_the_tokenizer(tokenizer: Path) -> None:
    config = Config.model_validate(
        {
            "token": "hidden-token",
            "store": "postgresql://user:hidden-password@host/name",
            "engines": [{"kind": "vllm", "url": "http://127.0.0.1:1", "options": {"api_key": "hidden-key"}}],
            "model": {"tokenizer": str(tokenizer)},
            "frozen": [{"name": "judge", "engines": [{"kind": "vllm", "url": "http://127.0.0.1:1/hidden"}]}],
        }
    )
    setup = settings_for_node(config, "far", CAPACITY)
    assert b"hidden" not in setup.config
    assert setup.folders[str(tokenizer)]["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", ["/model", "/", "../../up", "models/Qwen/Qwen3-8B"])
def test_copies_of_tokenizers_stay_in_their_folder(tmp_path: Path, folder: str) -> None:
    copy = Path(_copies({folder: {"tokenizer.json": b"{}", "../../evil": b""}}, tmp_path / "copies")[folder])
    assert copy.is_relative_to(tmp_path / "copies")
    assert [path.name for path in copy.iterdir()] == ["tokenizer.json"]
    assert copy.parts[-2:] == ("Qwen", "Qwen3-8B") or "Qwen" not in folder
    assert [path.name for path in tmp_path.iterdir()] == ["copies"]


class Dialling(Socket):
    """`Socket` of a node that sends its hello, and afterwards only the test's messages."""

    def __init__(self, instance: str, machine: str = "m" * 16, received: int = 0) -> None:
        hello = NodeHello(
            version=version("outrider"),
            instance=instance * 16,
            machine=machine,
            host="",
            capacity=Capacity(cpus=1.0, memory_mb=100),
            received=received,
        )
        self._come: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._come.put_nowait(encode(hello))
        self.closed: int | None = None
        self.welcome = asyncio.Event()

    async def send(self, frame: bytes) -> None:
        self.welcome.set()

    async def receive(self) -> bytes:
        if (frame := await self._come.get()) is None:
            raise Disconnected(1006)
        return frame

    async def close(self, code: int, reason: str) -> None:
        self.closed = code

    def begin(self) -> None:
        """Send that the node is ready to run attempts."""
        self._come.put_nowait(bytes(HEADER) + encode(Ready()))

    def cut(self) -> None:
        self._come.put_nowait(None)


class Joining:
    """The part of a service that nodes dial in to. The service has a node of its own, `local`."""

    def __init__(self, nodes: joined.JoinedNodes, tasks: asyncio.TaskGroup) -> None:
        self.nodes = nodes
        self.tasks = tasks

    @classmethod
    @asynccontextmanager
    async def open(cls, tokenizer: Path) -> AsyncIterator[Self]:
        parts = ServiceParts(None, None, {}, NodeResources(CAPACITY))  # type: ignore[arg-type]
        config = Config.model_validate({"model": {"tokenizer": str(tokenizer)}})
        async with (
            asyncio.timeout(20),
            asyncio.TaskGroup() as tasks,
            PoolPublisher({}) as telling,
            joined.JoinedNodes(config, parts, telling, own={"local"}) as nodes,
        ):
            yield cls(nodes, tasks)

    def attend(self, dialling: Dialling, name: str = "far", owner: str = "nodes") -> asyncio.Task[None]:
        return self.tasks.create_task(self.nodes.attend(name, dialling, owner))

    async def attended(self, dialling: Dialling, name: str = "far", owner: str = "nodes") -> asyncio.Task[None]:
        """Return when the node is welcomed or refused."""
        task = self.attend(dialling, name, owner)
        waiting = self.tasks.create_task(dialling.welcome.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return task


async def test_of_many_that_come_for_a_name_at_once_one_gets_it(tokenizer: Path) -> None:
    async with Joining.open(tokenizer) as joining:
        begun = asyncio.Event()
        joining.nodes.added.subscribe(lambda _: begun.set())
        first = Dialling("a")
        ended = await joining.attended(first)
        first.begin()
        await begun.wait()
        for refused, name in (
            (Dialling("b"), "far"),
            (Dialling("b", "n" * 16), "far"),
            (Dialling("b"), "local"),
            (Dialling("b", received=3), "other"),
        ):
            await joining.attended(refused, name)
            assert refused.closed == (Close.REMOVED if name == "other" else Close.CONFLICT)
        first.cut()
        await ended
        elsewhere = Dialling("c", "n" * 16)
        await joining.attended(elsewhere)
        assert elsewhere.closed == Close.CONFLICT, "the first may come back"
        many = [Dialling(letter) for letter in "defgh"]
        attending = [joining.attend(one) for one in many]
        await asyncio.wait(attending, timeout=1)
        assert sorted(str(one.closed) for one in many) == ["4409"] * 4 + ["None"]
        (taken,) = (one for one in many if one.closed is None)
        taken.cut()
        again = Dialling("d" if taken is many[0] else "z")
        await asyncio.wait(attending)
        await joining.attended(again)
        assert again.closed is None
        again.cut()


async def test_a_machine_that_died_while_it_started_does_not_keep_its_name(tokenizer: Path) -> None:
    """The name is free again when the connection ends, although the service waits two minutes for a node that starts.
    The restarted machine has a new id, so it counts as another machine."""
    async with Joining.open(tokenizer) as joining:
        first, early, again = Dialling("a"), Dialling("b", "n" * 16), Dialling("c", "n" * 16)
        ended = await joining.attended(first)
        await joining.attended(early)
        assert early.closed == Close.CONFLICT, "it is there"
        first.cut()
        await ended
        await joining.attended(again)
        assert again.closed is None
        again.cut()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("token", "error", "says"),
    [
        ("wrong", Unauthorized, "401"),
        (None, Unauthorized, "401"),
        ("submit", Forbidden, "--role node"),
        ("version", Conflict, "the service 0.0.0"),
        ("name", NotFound, "404"),
    ],
)
async def test_who_may_not_join_is_told_why(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, error: Any, says: str
) -> None:
    if token == "version":
        monkeypatch.setattr(joined, "installed_version", lambda _: "0.0.0")
    async with start(processes=0, token="root") as running:
        if token in ("submit", "version", "name"):
            role: Any = "submit" if token == "submit" else "node"
            given: str | None = (await running.service.tokens.create(TokenSpec(name="x", role=role))).text
        else:
            given = token
        url = f"{running.url}/elsewhere" if token == "name" else running.url
        with pytest.raises(ExceptionGroup) as raised:
            async with Machine().at(url, tmp_path, token=given):
                pass
        (found,) = raised.value.exceptions
        assert isinstance(found, error)
        assert says in f"{found} {found.hint}"


@pytest.mark.deep
async def test_a_node_may_do_nothing_but_join(start: Starts, tmp_path: Path) -> None:
    async with start(processes=0, token="root") as running:
        new = await running.service.tokens.create(TokenSpec(name="far", role="node"))
        async with Machine().at(running.url, tmp_path, token=new.text):
            await known(running, "far")


@pytest.mark.deep
async def test_a_machine_that_leaves_ends_its_sessions_first(start: Starts, tokenizer: Path, tmp_path: Path) -> None:
    machine = Machine()
    async with start(processes=0) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
        async with machine.at(running.url, tmp_path):
            begun = await running.submit("ask", "wait door", "ask", n=3)
            await running.here("door")
            machine.stop.set()
            await known(running)
            queued = await running.submit("ask", n=2)
            running.open("door")
            view = await running.done(begun)
            assert ends(view) == {StopReason.COMPLETED: 3}
            assert {session.attempt for session in view.sessions} == {1}
            await machine.left.wait()
            assert running.service.nodes().nodes == ()
            values = {(value.family, value.labels): value.value for value in await running.service.metrics.read()}
            started = values["outrider_sandbox_start_seconds", ("memory",)]
            assert isinstance(started, Distribution)
            assert sum(started.counts) == 3  # the counts of a machine that has left are kept
            assert ("outrider_node_sessions", ("far",)) not in values
        async with Machine("other").at(running.url, tmp_path):
            assert ends(await running.done(queued)) == {StopReason.COMPLETED: 2}
    assert node_processes() == set()


@pytest.mark.deep
async def test_a_connection_that_breaks_again_and_again_costs_nothing(
    start: Starts, tokenizer: Path, tmp_path: Path
) -> None:
    engine = StampingEngine(tokenizer, length=24)
    async with start(processes=0) as running:
        await running.service.pool.add_engine(engine)
        proxy = CuttingProxy(running.url, cuts=12, most=60_000, seed=3)
        async with proxy.open() as url, Machine().at(url, tmp_path):
            while proxy.made < 12:
                submitted = await running.submit("ask", "ask", "ask", n=24)
                view = await running.done(submitted)
                assert ends(view) == {StopReason.COMPLETED: 24}
                assert {session.attempt for session in view.sessions} == {1}
                replies = [reply for sample in view.samples or () for reply in replies_of(sample, engine)]
                assert [len(reply) for reply in replies] == [25] * 72


@pytest.mark.deep
async def test_a_machine_that_is_not_heard_of_is_given_up_and_joins_again(
    start: Starts, tokenizer: Path, tmp_path: Path
) -> None:
    engine = StampingEngine(tokenizer, length=LENGTH)
    async with start(processes=0, waits=HEARD_OF) as running:
        await running.service.pool.add_engine(engine)
        proxy = CuttingProxy(running.url)
        async with proxy.open() as url, Machine().at(url, tmp_path), Machine("near").at(running.url, tmp_path):
            await known(running, "far", "near")
            submitted = await running.submit("ask", "wait door", "ask", n=12)
            async with asyncio.timeout(60):
                while len(engine.requests) < 12:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            proxy.closed = True
            await proxy.cut()
            await known(running, "near")
            running.open("door")
            view = await running.done(submitted)
            assert ends(view) == {StopReason.COMPLETED: 12}
            assert {session.node for session in view.sessions} == {"near"}
            assert sorted(session.attempt for session in view.sessions) == [1] * 6 + [2] * 6
            assert [result_of(session).turns for session in view.sessions] == [2] * 12
            proxy.closed = False
            await known(running, "far", "near")
            again = await running.done(await running.submit("ask", n=8))
            assert {session.node for session in again.sessions} == {"far", "near"}


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_process_of_a_machine_that_dies_or_is_ended_or_hangs_is_started_again(
    start: Starts, tokenizer: Path, tmp_path: Path, number: int
) -> None:
    async with start(processes=0, waits=HEARD_OF) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
        async with Machine().at(running.url, tmp_path, processes=2):
            await known(running, "far-0", "far-1")
            submitted, _ = await running.at_door_on_both_nodes(8)
            killed = min(node_processes())
            os.kill(killed, number)
            if number == signal.SIGSTOP:
                async with asyncio.timeout(60):
                    while len(running.service.nodes().nodes) > 1:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                os.kill(killed, signal.SIGCONT)
            else:
                async with asyncio.timeout(60):
                    while killed in node_processes():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            await known(running, "far-0", "far-1")
            running.open("door")
            view = await running.done(submitted)
            assert ends(view) == {StopReason.COMPLETED: 8}
            assert {session.attempt for session in view.sessions} == {1, 2}


@pytest.mark.deep
async def test_machines_stay_when_the_service_is_started_again(start: Starts, tokenizer: Path, tmp_path: Path) -> None:
    async with start(processes=0) as running:
        url = running.url
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
        staying = Machine().at(url, tmp_path)
        await staying.__aenter__()
        submitted = await running.submit("ask", "wait door", "ask", n=4)
        await running.here("door")
    try:
        running.open("door")
        async with start(processes=0, port=int(url.rpartition(":")[2])) as running:
            await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
            view = await running.done(submitted)
            assert ends(view) == {StopReason.COMPLETED: 4}
            assert {(session.node, session.attempt) for session in view.sessions} == {("far", 2)}
    finally:
        await staying.__aexit__(None, None, None)
    assert node_processes() == set()


@pytest.mark.deep
async def test_a_name_is_one_machine_s(start: Starts, tokenizer: Path, tmp_path: Path) -> None:
    first, second = Machine(), Machine()
    async with start(processes=2) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
        async with asyncio.TaskGroup() as tasks:
            async with first.at(running.url, tmp_path):
                waiting = second.at(running.url, tmp_path)
                entering = tasks.create_task(waiting.__aenter__())
                await asyncio.sleep(5)
                assert not second.joined.is_set()
                await known(running, "local-0", "local-1", "far")
            await entering
            await known(running, "local-0", "local-1", "far")
            assert ends(await running.done(await running.submit("ask", n=12))) == {StopReason.COMPLETED: 12}
            await waiting.__aexit__(None, None, None)
    assert node_processes() == set()


@pytest.mark.deep
async def test_a_node_checks_paths_with_its_own_links(
    start: Starts, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service accepts a mount whose source is a link into an allowed folder. When the session starts, the link
    leads to another folder, and the node refuses the mount. The same task completes after the link is restored."""
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    engine = StampingEngine(tokenizer, length=LENGTH)
    for name in ("shared/v1", "secret", "uploads/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shared/now").symlink_to("v1")
    (tmp_path / "uploads/deep/data").write_text("given")
    runtime = {
        "kind": "namespace",
        "mounts": [{"source": str(tmp_path / "shared/now"), "target": "/mounted"}],
        "prepare": [{"upload": "deep", "to": "here"}, {"run": "test -d /mounted && cat here/data"}],
    }
    allowed = SandboxesConfig(allow=(tmp_path / "shared",))
    async with start(processes=0, files=tmp_path / "uploads", sandboxes=allowed) as running, served(engine) as url:
        await running.service.add_engine(EngineSpec(kind="vllm", name="near", url=url))
        early = await running.submit("ask", runtime=runtime)
        (tmp_path / "shared/now").unlink()
        (tmp_path / "shared/now").symlink_to(tmp_path / "secret")
        async with Machine().at(running.url, tmp_path, files=None):
            [session] = (await running.done(early)).sessions
            result = result_of(session)
            assert result.error is not None
            assert (result.error.code, result.error.field) == ("invalid_field", "task.runtime.mounts.0.source")
            assert result.verdict is None
            (tmp_path / "shared/now").unlink()
            (tmp_path / "shared/now").symlink_to("v1")
            late = await running.done(await running.submit("ask", runtime=runtime))
            assert ends(late) == {StopReason.COMPLETED: 1}


@pytest.mark.deep
async def test_a_machine_whose_default_kind_cannot_do_it_ends_the_session_with_an_error(
    start: Starts, tokenizer: Path, tmp_path: Path
) -> None:
    """The service has checked the task with its own default kind, `namespace`."""
    machine = SandboxesConfig(default_kind="process")
    async with start(processes=0) as running:
        await running.service.pool.add_engine(StampingEngine(tokenizer, length=LENGTH))
        async with Machine().at(running.url, tmp_path, sandboxes=machine):
            for kind in (None, "process"):  # the service has no node of its own, so only the machine checks `process`
                submitted = await running.submit("ask", runtime={"kind": kind, "image": "debian"}, max_attempts=2)
                [session] = (await running.done(submitted)).sessions
                result = result_of(session)
                assert result.error is not None
                assert (result.error.code, result.error.field) == ("runtime_unavailable", "task.runtime.image")
                assert (result.verdict, result.turns, session.attempt) == (None, 0, 1)
            assert ends(await running.done(await running.submit("ask", runtime={"kind": None}))) == {
                StopReason.COMPLETED: 1
            }


@pytest.mark.deep
async def test_a_machine_does_not_join_with_a_folder_that_holds_its_own_files(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    settings = tmp_path / "node.toml"
    settings.touch()
    async with start(processes=0) as running:
        machine = JoiningMachine(
            Config(files=tmp_path, processes=1).as_read_from(settings),
            CAPACITY,
            url=running.url,
            token=None,
            ca=None,
            name="far",
            joined=lambda _: None,
        )
        with pytest.raises(InvalidField, match="settings file"):
            await machine.run(asyncio.Event().wait, seconds=1)
    assert node_processes() == set()
