"""Limits on the files that are kept from a sandbox, and the layout of these files in the service's folder."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.lab.fakes.memory_runtime.runtime import MemoryRuntime
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.schemas import Artifact, ArtifactList
from outrider.sessions.artifacts import ArtifactCollector, ArtifactLimits, KeptFiles, make_folders
from outrider.spec import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskSpec
from outrider.store.artifacts import INDEX, ArtifactStore


class Hanging(MemoryRuntime):
    """A runtime whose listing of files never returns."""

    async def glob(self, pattern: str, *, limit: int = 0) -> list[str]:
        await asyncio.Event().wait()
        return []


async def a_sandbox(
    folder: Path, *patterns: str, kind: type[MemoryRuntime] = MemoryRuntime
) -> tuple[MemoryRuntime, TaskSpec]:
    """Return a started sandbox, and a task that keeps the sandbox's files which match `patterns`."""
    runtime_spec = RuntimeSpec(kind="memory")
    task = TaskSpec(
        instruction="x",
        harness=HarnessSpec(agent="tools"),
        runtime=runtime_spec,
        evaluator=EvaluatorSpec(run="true"),
        artifacts=list(patterns),
    )
    context = SandboxContext(
        session_id="s",
        attempt=1,
        directory=folder,
        host=Host(folder),
        gateway_url="",
        gateway_socket=folder / "g",
    )
    runtime = kind.create(runtime_spec, context)
    await runtime.start()
    await make_folders(runtime)
    return runtime, task


async def collected(
    folder: Path, bounds: ArtifactLimits, *patterns: str, kind: type[MemoryRuntime] = MemoryRuntime
) -> ArtifactList:
    """Return the artifacts collected from a sandbox with a few files."""
    runtime, task = await a_sandbox(folder, *patterns, kind=kind)
    files = {"d/1": b"aaaa", "d/2": b"bbbbbb", "d/3": b"cccc", "e": b"dd", "f1": b"", "f2": b"", "f3": b"", "f4": b""}
    for name, data in files.items():
        await runtime.write(name, data)
    store = ArtifactStore(folder)
    await ArtifactCollector(store, bounds).collect(runtime, task, "s", 1, KeptFiles())
    await runtime.stop()
    return store.listed("s")


async def test_bounds_of_files_and_of_all(tmp_path: Path) -> None:
    listed = await collected(tmp_path, ArtifactLimits(file_bytes=5, total_bytes=10, matches=3), "d/*", "e", "d/1", "f*")
    assert [file.path for file in listed.artifacts] == ["/work/d/1", "/work/d/3", "/work/e"]
    assert [(left.path, left.reason) for left in listed.left_out] == [
        ("/work/d/2", "/work/d/2 is larger than 5 bytes"),
        ("f*", "more than 3 paths match 'f*'"),
    ]


async def test_what_all_may_take_is_what_is_left_for_each(tmp_path: Path) -> None:
    listed = await collected(tmp_path, ArtifactLimits(file_bytes=5, total_bytes=6), "d/1", "d/3", "e")
    assert [file.path for file in listed.artifacts] == ["/work/d/1", "/work/e"]
    assert [left.reason for left in listed.left_out] == ["/work/d/3 is larger than 2 bytes (6 bytes are kept in all)"]


async def test_the_time_is_bounded_too(tmp_path: Path) -> None:
    listed = await collected(tmp_path, ArtifactLimits(seconds=0.1), "*", kind=Hanging)
    assert [left.reason for left in listed.left_out] == ["the files not listed could not be read within 0.1 s"]


async def test_the_steps_of_an_attempt_share_its_bounds(tmp_path: Path) -> None:
    """A replaced file still counts, because its data stays on the disk. An unchanged file is not counted again."""
    runtime, task = await a_sandbox(tmp_path, "*")
    store, kept = ArtifactStore(tmp_path), KeptFiles()
    collector = ArtifactCollector(store, ArtifactLimits(file_bytes=8, total_bytes=20, matches=2))
    seen = []
    for step in (
        {"a": b"aaaaaaaa", "b": b"1"},
        {"a": b"aaaaaaaa", "b": b"22"},
        {"b": None, "c": b"cccccccc"},
        {"a": b"AAAAAAAA", "c": None, "b": b"3"},
        {"a": b"aaaaaaaa", "b": None, "d": b""},
        {"a": None, "e": b""},
        {"d": None, "f": b""},
    ):
        for name, data in step.items():
            if data is None:
                await runtime.exec(["rm", name], seconds=10)
            else:
                await runtime.write(name, data)
        listed = await collector.collect(runtime, task, "s", 1, kept)
        assert store.listed("s") == listed
        sizes = {Path(each.path).name: each.size for each in listed.artifacts}
        seen.append((sizes, {Path(each.path).name: each.reason for each in listed.left_out}))
    full = "(20 bytes are kept in all)"
    assert seen == [
        ({"a": 8, "b": 1}, {}),
        ({"a": 8, "b": 2}, {}),
        ({"a": 8, "b": 2, "c": 8}, {}),
        ({"b": 1, "c": 8}, {"a": f"/work/a is larger than 1 bytes {full}"}),  # the first `a` is outdated
        ({"b": 1, "c": 8, "d": 0}, {"a": f"/work/a is larger than 0 bytes {full}"}),
        ({"b": 1, "c": 8, "d": 0, "e": 0}, {}),
        ({"b": 1, "c": 8, "d": 0, "e": 0}, {"f": "4 files are kept in all"}),
    ]
    await runtime.stop()


class Unwritable(MemoryRuntime):
    """A runtime in which nothing can be written to /tmp."""

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        if path.startswith("/tmp/"):
            raise RuntimeFailure("permission denied")
        await super().write(path, data, executable=executable)


async def test_a_sandbox_without_folders_is_used_nevertheless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = await collected(tmp_path, ArtifactLimits(), "e", kind=Unwritable)
    assert [file.path for file in listed.artifacts] == ["/work/e"]
    assert "no folders for artifacts and logs: permission denied" in caplog.text


def test_what_is_kept_lies_by_its_digest_and_is_listed_last(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    digest = store.put("s", 1, b"x")
    assert digest == hashlib.sha256(b"x").hexdigest()
    assert store.listed("s").attempt is None
    kept = Artifact(path="/../../x", size=1, sha256=digest)
    listed = ArtifactList(session_id="s", attempt=1, artifacts=(kept,), left_out=())
    store.index(listed)
    assert store.listed("s") == listed
    assert store.file("s", "/../../x") == tmp_path / "s/1" / digest
    assert sorted(path.name for path in (tmp_path / "s/1").iterdir()) == sorted([digest, INDEX])
