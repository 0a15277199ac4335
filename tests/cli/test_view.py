"""`outrider view` over a data folder and over a file of samples, and `outrider show --html`."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cli.world import PROGRAM, REPLIES, Cli
from outrider.api.finished_runs import serving_run
from outrider.cli.session_file import Recorded, Recording, html_file, session_page
from outrider.client.client import AsyncClient, Client
from outrider.client.sample_files import SampleFormat, sample_file
from outrider.errors import NotFound, OutriderError, ServiceError
from outrider.messages import Image
from outrider.redaction import KEY_PREFIX
from outrider.service.finished_runs import open_run
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.pictures import picture_service
from support.pictures import task as picture_task
from support.service import running_service, say

TASK: dict[str, Any] = {
    "instruction": "Write hi into out.txt.",
    "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "callable", "path": "cli.world:grade"},
    "labels": {"name": "hi"},
}


class Run:
    """A finished run: its data folder, its file of samples, its tokenizer, and the service's replies about the run."""

    def __init__(self, folder: Path) -> None:
        self.data, self.samples, self.tokenizer = folder / "data", folder / "rows.jsonl", folder / "tokenizer"
        self.group = ""
        self.shown: dict[str, Any] = {}


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        group = await client.submit({"task": TASK, "n": 2})
        await client.wait([group.id])
        view = await client.group(group.id, samples=True)
        made.group = group.id
        with sample_file(made.samples, SampleFormat.JSONL) as writer:
            writer.write(view.samples or ())
        for path in (f"groups/{group.id}", f"sessions/{group.id.replace('g-', 's-')}-1", "sessions"):
            made.shown[path] = json.loads(await client.reply_body(f"/v1/{path}"))
        for part in ("samples", "artifacts"):
            path = f"sessions/{group.id.replace('g-', 's-')}-1/{part}"
            made.shown[path] = json.loads(await client.reply_body(f"/v1/{path}"))
        path = f"sessions/{group.id.replace('g-', 's-')}-1/turns"
        made.shown[path] = json.loads(await client.reply_body(f"/v1/{path}", {"tokens": True, "pieces": True}))
    return made


@asynccontextmanager
async def viewing(path: Path, *more: str) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Run the command in a process of its own until Ctrl-C. Yields its URL and an HTTP client."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "view", str(path), *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), 50)).decode()
        [url] = re.findall(r"(http://127\.0\.0\.1:\d+)/", said)
        async with aiohttp.ClientSession() as http:
            yield url, http
    finally:
        process.send_signal(signal.SIGINT)
        _, error = await process.communicate()
    assert (process.returncode, error) == (0, b"")


async def get(http: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any]:
    async with http.get(url, headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.deep
async def test_a_data_folder_shows_what_the_service_has_shown(run: Run) -> None:
    async with viewing(run.data, "--tokenizer", str(run.tokenizer)) as (url, http):
        for path, shown in run.shown.items():
            query = "?tokens=true&pieces=true" if path.endswith("turns") else ""
            assert await get(http, f"{url}/v1/{path}{query}") == (200, shown), path
        status, timeline = await get(http, f"{url}/v1/sessions/{run.group.replace('g-', 's-')}-0/timeline")
        assert (status, timeline["state"]) == (200, "done")
        assert {span["kind"] for span in timeline["spans"]} >= {"stage", "call"}
        async with http.get(f"{url}/") as page:
            assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert "default-src 'none'" in page.headers["content-security-policy"]
        for method in ("post", "delete"):
            async with http.request(method, f"{url}/v1/groups/{run.group}") as reply:
                assert reply.status == 404
        assert (await get(http, f"{url}/v1/groups", Host="evil.example"))[0] == 401
        assert (await get(http, f"{url}/v1/groups", Origin="http://evil.example"))[0] == 401
        assert (await get(http, f"{url}/v1/tokens"))[0] == 404


@pytest.mark.deep
async def test_a_file_of_samples_has_the_tokens_of_its_turns(run: Run) -> None:
    turns = f"sessions/{run.group.replace('g-', 's-')}-1/turns"
    async with viewing(run.samples, "--tokenizer", str(run.tokenizer)) as (url, http):
        _, found = await get(http, f"{url}/v1/{turns}?tokens=true")
        for own, shown in zip(found["turns"], run.shown[turns]["turns"], strict=True):
            same = ("index", "parent", "kind", "prompt_tokens", "output_tokens", "versions", "sampled", "context")
            assert {name: own[name] for name in same} == {name: shown[name] for name in same}
            ids = ("prompt_delta", "output_ids", "logprobs", "prompt_pieces", "output_pieces")
            assert {name: own["tokens"][name] for name in ids} == {name: shown["tokens"][name] for name in ids}
        session = f"sessions/{run.group.replace('g-', 's-')}-1"
        _, view = await get(http, f"{url}/v1/{session}")
        before = run.shown[session]["result"]
        assert view["result"]["verdict"]["reward"] == before["verdict"]["reward"]
        assert view["result"]["tokens"]["trained"] == before["tokens"]["trained"]
        assert (await get(http, f"{url}/v1/{session}/samples"))[1] == run.shown[f"{session}/samples"]
        _, groups = await get(http, f"{url}/v1/groups?label=name%3Dhi&min_reward=0.5")
        assert [group["id"] for group in groups["groups"]] == [run.group]
        assert (await get(http, f"{url}/v1/groups?max_reward=0.5"))[1] == {"groups": [], "after": None}
        assert (await get(http, f"{url}/v1/groups?label=name%3Dho"))[1]["groups"] == []
        assert len((await get(http, f"{url}/v1/sessions?stop_reason=completed"))[1]["sessions"]) == 2
        assert (await get(http, f"{url}/v1/sessions?state=running"))[1]["sessions"] == []
        assert (await get(http, f"{url}/v1/sessions?min_reward=x"))[0] == 422
        assert (await get(http, f"{url}/v1/sessions/s-1-0"))[0] == 404


async def test_a_run_is_not_changed_and_not_opened_twice(run: Run) -> None:
    tokenizer = Tokenizer.load(run.tokenizer)
    async with open_run(run.data, tokenizer) as stored:
        assert [group.id for group in await stored.groups(None)] == [run.group]
        with pytest.raises(Exception, match="another service is using"):
            async with open_run(run.data, None):
                pass
    (run.data / "task.key").unlink()
    async with open_run(run.data, None) as stored:  # without the tasks' key and without a tokenizer
        turns = json.loads(await stored.turns(f"{run.group.replace('g-', 's-')}-0", tokens=True))["turns"]
        assert turns[0]["tokens"]["output_pieces"] is None
        assert turns[0]["tokens"]["output_ids"]


LISTS = (
    "groups?harness=tools", "groups?harness=command", "sessions?harness=command",
    "groups?group={first}", "sessions?group={first}&group={second}", "sessions?group={second}",
    "groups?until={later}", "groups?since={later}", "sessions?until={later}", "sessions?until=9e9",
    "groups?text=LOST", "sessions?text=LOST", "groups?error={code}", "sessions?error={code}",
    "groups?error={code}&stop_reason=completed", "groups?stop_reason=error", "groups?min_reward=0.5",
    "groups?state=active", "sessions?state=running&state=done", "groups?label=name%3Dhi",
    "groups?label=name", "groups?state=running", "sessions?stop_reason=bored", "groups?limit=0", "sessions?until=soon",
)  # fmt: skip


async def test_lists_are_filtered_as_the_service_filters_them(tmp_path: Path) -> None:
    program = {"command": ["sh", "-c", "echo all is lost; exit 3"], "nonzero_exit": "error"}
    failing = {"instruction": "Fail.", "harness": program, "runtime": {"kind": "process"}, "max_attempts": 1}
    failing["evaluator"] = {"run": "true"}
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        (first,) = await client.wait([(await client.submit({"task": TASK, "n": 2})).id])
        (second,) = await client.wait([(await client.submit({"task": failing, "n": 2})).id])
        assert second.sessions[0].result
        assert second.sessions[0].result.error
        code = second.sessions[0].result.error.code
        lists = [each.format(first=first.id, second=second.id, later=second.created, code=code) for each in LISTS]
        async with aiohttp.ClientSession() as http:
            shown = {path: await get(http, f"{url}/v1/{path}") for path in lists}
    assert [len(shown[f"{kind}?error={code}"][1][kind]) for kind in ("groups", "sessions")] == [1, 2]
    async with (
        open_run(tmp_path / "data", None) as stored,
        serving_run(stored, 0) as url,
        aiohttp.ClientSession() as http,
    ):
        for path in lists:
            assert await get(http, f"{url}/v1/{path}") == shown[path], path


async def test_a_file_of_samples_refuses_filters_for_data_that_it_lacks(run: Run) -> None:
    async with (
        open_run(run.samples, None) as rows,
        serving_run(rows, 0) as url,
        aiohttp.ClientSession() as http,
    ):
        for name, value in (("harness", "tools"), ("error", "x"), ("text", "x"), ("since", "1"), ("until", "1")):
            for kind in ("groups", "sessions"):
                status, error = await get(http, f"{url}/v1/{kind}?{name}={value}")
                assert (status, error["field"]) == (422, name)
        assert len((await get(http, f"{url}/v1/sessions?group={run.group}"))[1]["sessions"]) == 2
        assert (await get(http, f"{url}/v1/sessions?group=g-1"))[1]["sessions"] == []


async def test_what_is_no_run_is_refused_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\x00\n")
    for name, words in (
        ("rows.jsonl", "line 1 of"), ("empty.jsonl", "has no rows"), ("bytes.jsonl", "line 1 of"),
        ("nothing", "cannot read"), (".", "is no data folder"),
    ):  # fmt: skip
        ran = await cli("view", str(tmp_path / name))
        assert ran.code == 2
        assert words in ran.err


async def test_a_session_becomes_one_file(cli: Cli, tmp_path: Path) -> None:
    said = "</script><script>x=1</script><!-- \u2028x"
    async with running_service(tmp_path=tmp_path, replies=[say(said)]) as (_, url):
        async with AsyncClient(url) as client:
            group = await client.submit({"task": TASK})
            await client.wait([group.id])
        file = tmp_path / "session.html"
        ran = await cli("show", group.sessions[0].id, "--html", str(file), "--json", "--url", url)
        assert ran.document == {"output": str(file), "size": file.stat().st_size}
        missing = await cli("show", "s-1-0", "--html", str(tmp_path / "no.html"), "--url", url)
        assert (missing.code, (tmp_path / "no.html").exists()) == (2, False)
        assert (await cli("show", group.sessions[0].id, "--html", str(file / "b"), "--url", url)).code == 2
    html = file.read_text()
    assert html.count("<script") == html.count("</script>") == 2  # the data and the bundle
    assert "default-src 'none'; script-src 'sha256-" in html
    assert not re.findall(r'(?:src|href)="', html.split('<div id="page">')[0])
    data = json.loads(re.findall(r'id="outrider-data">(.*?)</script>', html, re.DOTALL)[0])
    base = f"/v1/sessions/{group.sessions[0].id}"
    assert {base, f"{base}/turns", f"{base}/timeline", f"{base}/samples", f"{base}/artifacts"} <= set(data["replies"])
    turn = data["replies"][f"{base}/turns"]["json"]["turns"][0]
    assert turn["tokens"]["reply"]["content"] == said
    assert "".join(turn["tokens"]["output_pieces"]) == turn["sampled"]


async def test_a_file_lacks_no_image_because_the_service_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an image that the service no longer has is left out."""
    asked: list[str] = []

    def image(error: OutriderError) -> Callable[[str], Image]:
        def get(digest: str) -> Image:
            asked.append(digest)
            raise error

        return get

    async with picture_service(tmp_path) as (_, url, _), AsyncClient(url) as api:
        group = await api.submit({"task": picture_task("messages")})
        await api.wait([group.id])

        def pages() -> None:
            with Client(url) as client:
                monkeypatch.setattr(client, "image", image(NotFound("it is removed")))
                assert session_page(client, group.sessions[0].id)
                monkeypatch.setattr(client, "image", image(ServiceError("the service is away")))
                with pytest.raises(ServiceError, match="is away"):
                    session_page(client, group.sessions[0].id)

        await asyncio.to_thread(pages)
    assert len(asked) == 2


def test_a_file_has_no_key_and_no_text_that_ends_an_element() -> None:
    key = f"{KEY_PREFIX}x_{'a' * 40}"
    text = json.dumps({"a": f"</SCRIPT> {key} <!--"}).encode()
    made = html_file(Recording("now", {"/v1/a": Recorded(json=msgspec.Raw(text))}), title="<b>s-1").decode()
    assert key not in made
    assert "<b>" not in made.split("<style>")[0]
    assert "</SCRIPT>" not in made
