"""A token that may submit gives no access to the service's own files, neither by an upload nor by a path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import load_config
from outrider.errors import InvalidField
from outrider.service.assembly import open_service
from outrider.spec import TokenSpec
from support.service import RENDERER, say
from support.tokenizer import write_tokenizer

SETTINGS = """
token = "the-operators"

[model]
tokenizer = "{tokenizer}"
renderer = "{renderer}"

[[engines]]
kind = "scripted"

[engines.options]
replies = [{reply}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a service is started, with its settings, as in docs/config.md."""
    folder = tmp_path / "work"
    folder.mkdir()
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    text = SETTINGS.format(tokenizer=tokenizer, renderer=RENDERER, reply=repr(say("hello")))
    (folder / "outrider.toml").write_text(text)
    monkeypatch.chdir(folder)
    return folder


@asynccontextmanager
async def submitter(**flags: Any) -> AsyncIterator[AsyncClient]:
    """Yield a client with a token of the role submit, of a service as `outrider serve --config outrider.toml` starts
    it."""
    config = load_config({"port": 0, **flags}, file=Path("outrider.toml"))
    async with open_service(config) as opened, serving(*opened) as url:
        alice = await opened.service.tokens.create(TokenSpec(name="alice", role="submit"))
        async with AsyncClient(url, token=alice.text) as client:
            yield client


def body(runtime: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "task": {
            "instruction": "say hello",
            "harness": {"agent": "tools"},
            "evaluator": {"kind": "command", "run": "true"},
            "runtime": {"kind": "memory", **runtime},
            **fields,
        }
    }


OWN_FILES = ["outrider.toml", ".outrider", ".outrider/outrider.sqlite3", "./outrider.toml", "."]


@pytest.mark.parametrize("name", OWN_FILES)
async def test_a_submit_token_uploads_nothing_of_a_service_without_a_folder_for_it(folder: Path, name: str) -> None:
    upload = {"prepare": [{"upload": name, "to": "x"}]}
    step = {"instruction": "more", "evaluator": {"kind": "command", "run": "true"}, **upload}
    grader = {"kind": "command", "run": "true", "carry": ["x"], "runtime": {"kind": "memory", **upload}}
    asked = [
        ("task.runtime.prepare.0.upload", body(upload)),
        ("task.then.0.prepare.0.upload", body({}, then=[step])),
        ("task.evaluator.runtime.prepare.0.upload", body({}, evaluator=grader)),
    ]
    async with submitter() as client:
        for field, group in asked:
            with pytest.raises(InvalidField, match="no folder of files for tasks") as refused:
                await client.submit(group)
            assert (refused.value.field, "--files" in str(refused.value.hint)) == (field, True)


@pytest.mark.parametrize("flags", [{"files": "."}, {"files": ".."}, {"sandboxes": {"allow": ["."]}}])
async def test_a_service_does_not_start_with_a_folder_that_holds_its_own_files(
    folder: Path, flags: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField, match="tasks could read it"):
        async with submitter(**flags):
            pass


NAMES = ["../outrider.toml", "/outrider.toml", "link", "link/outrider.sqlite3", "proc", "chain", "a\n../outrider.toml"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_submit_token_gets_nothing_from_beside_the_folder(folder: Path, name: str) -> None:
    files = folder / "uploads"
    files.mkdir()
    (files / "link").symlink_to("../.outrider")
    (files / "chain").symlink_to("hop")
    (files / "hop").symlink_to(folder / "outrider.toml")
    (files / "proc").symlink_to(f"/proc/self/root{folder}/outrider.toml")
    async with submitter(files="uploads") as client:
        with pytest.raises(InvalidField) as refused:
            await client.submit(body({"prepare": [{"upload": name, "to": "x"}]}))
        assert refused.value.field == "task.runtime.prepare.0.upload"


@pytest.mark.parametrize(
    "path", ["{}/outrider.toml", "{}/.outrider", "/proc/self/root{}", "{}/shared/../.outrider", "/"]
)
async def test_a_submit_token_mounts_nothing_of_the_service(folder: Path, path: str) -> None:
    (folder / "shared").mkdir()
    named = path.format(folder)
    asked: list[dict[str, Any]] = [{"rootfs": named}, {"image": named}, {"mounts": [{"source": named, "target": "/x"}]}]
    async with submitter(sandboxes={"allow": ["shared"]}) as client:
        for runtime in asked:
            with pytest.raises(InvalidField):
                await client.submit(body({"kind": "namespace", **runtime}))


async def test_what_cannot_be_uploaded_is_named_as_the_task_names_it(folder: Path) -> None:
    (folder / "uploads").mkdir()
    (folder / "uploads" / "link").symlink_to("/etc")
    async with submitter(files="uploads") as client:
        group = await client.submit(body({"prepare": [{"upload": ".", "to": "x"}]}, max_attempts=1))
        (done,) = await client.wait([group.id])
    result = done.sessions[0].result
    assert result is not None
    assert result.error is not None
    assert result.error.message == "cannot upload link: a symbolic link that leaves the uploaded folder"


@pytest.mark.parametrize("kind", ["memory", "namespace"])
async def test_what_the_operator_gives_is_uploaded(folder: Path, kind: str) -> None:
    (folder / "uploads/deep").mkdir(parents=True)
    (folder / "uploads/deep/data").write_text("0.75")
    (folder / "uploads/current").symlink_to("deep")
    task = body(
        {"kind": kind, "prepare": [{"upload": "current", "to": "here"}]},
        evaluator={"kind": "command", "run": "cat here/data > $OUTRIDER_VERDICT"},
    )
    async with submitter(files="uploads") as client:
        group = await client.submit(task)
        [group] = await client.wait([group.id])
    [session] = group.sessions
    assert session.result is not None
    assert (session.result.error, session.result.verdict and session.result.verdict.reward) == (None, 0.75)


@pytest.mark.parametrize("swapped", ["deep", "deep/outrider.toml"])
async def test_a_link_that_is_put_there_after_the_check_fails_the_attempt(folder: Path, swapped: str) -> None:
    """A prepare step makes the link, in a sandbox without isolation. Only the operator may submit such a task."""
    files = folder / "uploads"
    (files / "deep").mkdir(parents=True)
    (files / "deep/outrider.toml").write_text("harmless")
    goal = folder if swapped == "deep" else folder / "outrider.toml"
    swap = f"mv {files}/{swapped} {files}/before && ln -s {goal} {files}/{swapped}"
    prepare = [{"run": swap}, {"upload": "deep/outrider.toml", "to": "stolen"}]
    async with submitter(files="uploads") as alice, AsyncClient(alice.url, token="the-operators") as client:
        group = await client.submit(body({"kind": "process", "prepare": prepare}, max_attempts=1))
        [group] = await client.wait([group.id])
    [session] = group.sessions
    assert session.result is not None
    assert session.result.error is not None
    assert "outside the files folder" in session.result.error.message
    assert session.result.verdict is None
