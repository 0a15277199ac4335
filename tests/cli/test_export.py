"""`outrider export` against a live service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.test_sample_files import read_parquet
from cli.world import REPLIES, STALLED, Cli, write_task
from outrider.cli.export import PAGE, _groups
from outrider.cli.task_sources import load_group
from outrider.client.client import AsyncClient, Client
from outrider.client.pass_rate import evaluate
from outrider.errors import ServiceError
from outrider.messages import Message, Role, ToolCall
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import ChatRow
from support.coin import coin_task
from support.pictures import ADDRESS, PNG, picture_service, task
from support.service import RENDERER, running_service, scripted_engine


@pytest.mark.deep
async def test_both_formats_give_every_sample_of_every_page(cli: Cli, tmp_path: Path) -> None:
    spec = load_group(write_task(tmp_path), n=1, priority=0)
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        groups = [(await client.submit(spec)).id for _ in range(PAGE + 2)]
        await client.wait(groups)
        printed = await cli("export", "--url", url)
        written = await cli("export", "--format", "parquet", "-o", tmp_path / "rows", "--url", url, "--json")
        named = await cli("export", "-o", tmp_path / "rows.parquet", "--url", url)
        truth = [
            sample.ids.tolist()
            for group in groups
            for sample in (await client.group(group, samples=True)).samples or ()
        ]
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert (printed.code, written.code) == (0, 0)
    assert {line["group_id"] for line in lines} == set(groups)
    assert sorted(line["ids"] for line in lines) == sorted(truth)
    assert read_parquet(tmp_path / "rows") == lines
    assert read_parquet(tmp_path / "rows.parquet") == lines  # the file's ending selects the format
    assert f"in {tmp_path / 'rows.parquet'}" in " ".join(named.err.split())
    assert written.document == {
        "samples": PAGE + 2,
        "left_out": 0,
        "groups": PAGE + 2,
        "evaluations": 0,
        "cursor": written.document["cursor"],
        "output": str(tmp_path / "rows"),
        "sha256": hashlib.sha256((tmp_path / "rows").read_bytes()).hexdigest(),
        "images": 0,
        "image_files": None,
    }
    assert not (tmp_path / "images").exists()


async def test_the_output_may_be_a_pipe(cli: Cli, tmp_path: Path) -> None:
    """Such as /dev/stdout. Its rows are not read again for a digest, which would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
            ran = await cli("run", write_task(tmp_path), "--url", url, "--json")
            written = await cli("export", "-o", pipe, "--url", url, "--json")
        [line] = os.read(reader, 1 << 20).splitlines()
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert json.loads(line)["group_id"] == ran.document["id"]
    assert (written.document["samples"], written.document["sha256"]) == (1, None)


@pytest.mark.deep
async def test_the_cursor_goes_on_where_the_last_export_ended(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        await cli("run", write_task(tmp_path), "--url", url)
        first = await cli("export", "-o", tmp_path / "first", "--json", "--url", url)
        second = await cli("run", write_task(tmp_path), "-n", "2", "--json", "--url", url)
        rest = await cli("export", "--after", str(first.document["cursor"]), "--url", url)
    assert first.document["samples"] == 1
    assert {json.loads(line)["group_id"] for line in rest.out.splitlines()} == {second.document["id"]}
    assert "2 samples of 1 group" in rest.err


async def test_an_error_of_the_page_that_is_read_ahead_ends_the_export(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        submitted = [(await client.submit({"task": coin_task(number), "n": 1})).id for number in range(3)]
        await client.wait(submitted)
        with Client(url, patience=0) as blocking:
            groups = _groups(blocking, None, 0, samples=True, limit=1)
            assert (await asyncio.to_thread(next, groups)).id in submitted
            await asyncio.to_thread(groups.close)  # an export that ends early does not wait for the next page
            groups = _groups(blocking, None, 0, samples=True, limit=1)
            await asyncio.to_thread(next, groups)
            blocking.run(blocking.asynchronous.__aexit__(None, None, None))  # closes all connections
            with pytest.raises(ServiceError):
                await asyncio.to_thread(list, groups)


async def test_only_what_was_good_enough(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        tasks = [coin_task(number, reward=reward) for number, reward in enumerate((0.0, 0.5, 1.0))]
        groups = [(await client.submit({"task": task, "n": 2})).id for task in tasks]
        await client.wait(groups)
        ran = await cli("export", "--min-reward", "0.5", "--url", url)
    assert sorted(json.loads(line)["reward"] for line in ran.out.splitlines()) == [0.5, 0.5, 1.0, 1.0]
    assert "2 samples with a reward below 0.5, or none, were left out" in ran.err


async def test_evaluations_are_left_out_unless_they_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        await client.wait([(await client.submit({"task": coin_task(0, reward=1.0)})).id])
        found = await evaluate(client, [coin_task(1, reward=1.0)])
        train = await cli("export", "--url", url)
        chats = await cli("export", "--format", "chat", "-o", tmp_path / "chats", "--json", "--url", url)
        asked = await cli("export", "--group", found.groups[0].id, "--url", url)
    [line] = map(json.loads, train.out.splitlines())
    assert line["group_id"] != found.groups[0].id
    assert "1 groups of evaluations were left out" in train.err
    assert (chats.document["groups"], chats.document["evaluations"], chats.document["cursor"]) == (1, 1, 2)
    assert [json.loads(line)["group_id"] for line in asked.out.splitlines()] == [found.groups[0].id]


async def test_chat_rows_render_to_the_ids_of_the_samples(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        good = await client.submit(load_group(write_task(tmp_path), n=1, priority=0))
        bad = await client.submit({"task": coin_task(0, reward=0.0)})
        [done, _] = await client.wait([good.id, bad.id])
        path = tmp_path / "chats.jsonl"
        ran = await cli("export", "--format", "chat", "--min-reward", "1", "-o", path, "--json", "--url", url)
        [sample] = await client.samples(done.sessions[0].id)
        [row] = await client.chat_rows(done.sessions[0].id)
    assert (ran.document["samples"], ran.document["left_out"]) == (1, 1)
    assert ran.document["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    [line] = map(json.loads, path.read_text().splitlines())
    assert msgspec.convert(line, type=ChatRow) == row
    assert (row.reward, row.labels, row.session_id) == (1.0, {"name": "hi"}, sample.session_id)
    assert row.tools is not None
    assert [tool["function"]["name"] for tool in row.tools] == ["bash"]
    assert [(message["role"], message.get("weight")) for message in row.messages][-4:] == [
        ("user", None),
        ("assistant", 1),
        ("tool", None),
        ("assistant", 1),
    ]
    renderer = make_renderer(Tokenizer.load(tmp_path / "tokenizer"), RENDERER)
    said = [place for place, message in enumerate(row.messages) if message["role"] == "assistant"]
    for place, (start, end) in zip(said, sample.turn_spans, strict=True):
        assert renderer.render(read_messages(row.messages[:place]), row.tools) == sample.ids[:start].tolist()
        more = [*read_messages(row.messages[: place + 1]), Message(role=Role.USER, content="more")]
        assert renderer.render(more, row.tools)[:end] == sample.ids[:end].tolist()


async def test_trajectories_have_the_sampled_ids(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        good = await client.submit(load_group(write_task(tmp_path), n=1, priority=0))
        bad = await client.submit({"task": coin_task(0, reward=0.0)})
        [done, _] = await client.wait([good.id, bad.id])
        ran = await cli("export", "--format", "atif", "--min-reward", "1", "--url", url)
        [sample] = await client.samples(done.sessions[0].id)
        [row] = await client.chat_rows(done.sessions[0].id)
    [line] = map(json.loads, ran.out.splitlines())
    steps = line["steps"]
    assert (line["schema_version"], line["session_id"]) == ("ATIF-v1.8", sample.session_id)
    assert line["agent"]["tool_definitions"] == row.tools
    assert line["extra"]["reward"] == 1.0
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    said = [step for step in steps if step["source"] == "agent"]
    for step, (start, end) in zip(said, sample.turn_spans, strict=True):
        metrics = step["metrics"]
        assert metrics["prompt_token_ids"] == sample.ids[:start].tolist()
        assert metrics["completion_token_ids"] == sample.ids[start:end].tolist()
        assert metrics["logprobs"] == sample.logprobs[start:end].tolist()
    [call] = said[0]["tool_calls"]
    [result] = said[0]["observation"]["results"]
    assert result["source_call_id"] == call["tool_call_id"]
    tool = next(message for message in row.messages if message["role"] == "tool")
    assert result["content"] == tool["content"]
    assert isinstance(call["arguments"], dict)


def read_messages(rows: list[dict[str, Any]]) -> list[Message]:
    messages = []
    for row in rows:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]))
            for call in row.get("tool_calls", ())
        )
        messages.append(
            Message(
                role=Role(row["role"]),
                content=row["content"],
                tool_calls=calls,
                tool_call_id=row.get("tool_call_id"),
            )
        )
    return messages


async def test_one_group_alone(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        await cli("run", write_task(tmp_path), "--url", url)
        wanted = await cli("run", write_task(tmp_path), "--json", "--url", url)
        ran = await cli("export", "--group", wanted.document["id"], "--url", url)
    assert [json.loads(line)["group_id"] for line in ran.out.splitlines()] == [wanted.document["id"]]


async def test_a_group_that_runs_has_nothing_to_export(cli: Cli, tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path, [STALLED])
    async with running_service(tmp_path=tmp_path, engine=engine) as (_, url), AsyncClient(url) as client:
        group = await client.submit(load_group(write_task(tmp_path), n=1, priority=0))
        ran = await cli("export", "--group", group.id, "-o", tmp_path / "rows", "--url", url)
    assert (ran.code, ran.err.splitlines()[0]) == (2, f"error: group {group.id} is not done")
    assert not (tmp_path / "rows").exists()


async def test_images_are_written_beside_the_samples_each_once(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with picture_service(tmp_path, sessions=2) as (_, url, _), AsyncClient(url) as client:
        await client.wait([(await client.submit({"task": task("messages"), "n": 2})).id])
        printed = await cli("export", "--url", url)
        written = await cli("export", "-o", out / "rows", "--url", url, "--json")
        again = await cli("export", "--format", "parquet", "-o", out / "table", "--url", url)
        await cli("export", "--format", "chat", "-o", out / "chats", "--url", url)
    image = out / "images" / f"{hashlib.sha256(PNG).hexdigest()}.png"
    assert [(path, path.read_bytes()) for path in (out / "images").iterdir()] == [(image, PNG)]
    assert (written.document["images"], written.document["image_files"]) == (1, str(out / "images"))
    assert f"1 images in {out / 'images'}" in again.err
    chats = [json.loads(line) for line in (out / "chats").read_text().splitlines()]
    contents = [message["content"] for message in chats[0]["messages"] if message["role"] == "user"]
    assert contents[0] == [{"type": "text", "text": "look"}, {"type": "image", "path": f"images/{image.name}"}]
    assert {"type": "image", "url": ADDRESS} in contents[-1]
    assert all(isinstance(message["content"], list) for chat in chats for message in chat["messages"])
    lines = [json.loads(line) for line in (out / "rows").read_text().splitlines()]
    assert {shown["digest"] for line in lines for shown in line["images"] if not shown["url"]} == {image.stem}
    assert [shown["url"] for shown in lines[0]["images"]] == [None, None, ADDRESS]
    assert read_parquet(out / "table") == lines
    assert printed.out.splitlines() == (out / "rows").read_text().splitlines()
    assert "1 images are kept by the service" in printed.err


def test_parquet_and_json_need_a_file(cli: Cli) -> None:
    for words in (["--format", "parquet"], ["--json"]):
        ran = cli.run("export", *words)
        assert ran.code == 2
        assert "hint: add -o FILE" in ran.err
