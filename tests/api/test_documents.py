"""PDF documents in model calls, in every dialect: the model reads their pages as texts or as pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from api.test_vision import check_images, error_of, kill_decoders, refusal_of, sample_of, sent_spans, vision_service
from outrider.client.client import AsyncClient
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.service import model_backends
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Sample
from support.pdfs import block, pdf
from support.pictures import COUNTED, PATHS, picture_service
from support.service import END, say
from support.vision import REFUSALS, conversation, reply_text

pytest.importorskip("pypdfium2")
PDF = pdf(["first words", "second words"])
CALL = f'<tool_call>\n{{"name": "screenshot", "arguments": {{}}}}\n</tool_call>{END}'
SHOWN = '<document>\n<page number="1">\nfirst words\n</page>\n<page number="2">\nsecond words\n</page>\n</document>\n'


def with_document(dialect: str, body: dict[str, Any], data: bytes, more: Mapping[str, str]) -> dict[str, Any]:
    """Return the body with the document in the result of its tool, or in its first user message if it has no such
    result."""
    messages: list[dict[str, Any]] = body.get("messages") or body.get("input") or body["contents"]
    found = {**block(dialect, data), **more}
    match dialect:
        case "chat":
            at = next((each for each in messages if each["role"] == "tool"), messages[0])
            at["content"] = [found, *at["content"]]
        case "responses":
            result = next((each for each in messages if each.get("type") == "function_call_output"), None)
            if result is not None:
                result["output"] = [found, *result["output"]]
            else:
                messages[0]["content"] = [found, *messages[0]["content"]]
        case "messages":
            results = [part for each in messages for part in each["content"] if isinstance(part, dict)]
            result = next((part for part in results if part.get("type") == "tool_result"), None)
            into = messages[0] if result is None else result
            into["content"] = [found, *into["content"]]
        case _:
            parts = [part for each in messages for part in each["parts"] if "functionResponse" in part]
            into = parts[0]["functionResponse"] if parts else messages[0]
            into["parts"] = [found, *into.get("parts", ())]
    return body


COUNTS: list[dict[str, Any]] = []
"""The replies to the requests for a count of tokens, before each call in the dialect `messages`."""


class Sender:
    """An agent that sends a document. Options: `dialect`, `turns` as for the agent of `support.vision`, and `document`
    in base64."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._dialect: str = options["dialect"]
        self._turns: list[tuple[str, list[bytes]]] = [(text, []) for text in options["turns"]]
        self._document = base64.b64decode(options["document"])
        self._more: dict[str, str] = {}

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        replies: list[str] = []
        base = context.endpoint.base_url
        async with aiohttp.ClientSession() as http:
            for count in range(1, len(self._turns) + 1):
                body = conversation(self._dialect, self._turns[:count], replies)
                if self._turns[-1][0] != "tool" or count == len(self._turns):
                    body = with_document(self._dialect, body, self._document, self._more)
                if self._dialect == "messages":
                    async with http.post(base + COUNTED, json=body) as counted:
                        COUNTS.append(await counted.json())
                async with http.post(base + PATHS[self._dialect], json=body) as reply:
                    if reply.status != 200:
                        REFUSALS.append(f"{reply.status}: {await reply.text()}")
                        return HarnessOutcome()
                    replies.append(reply_text(self._dialect, await reply.json()))
        return HarnessOutcome()


class TitledSender(Sender):
    """A `Sender` whose document has a title and a context, in the dialect `messages`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._more = {"title": "The title", "context": "Its context"}


def task(dialect: str, turns: Sequence[str], data: bytes = PDF) -> dict[str, Any]:
    options = {"dialect": dialect, "turns": list(turns), "document": base64.b64encode(data).decode()}
    return {
        "instruction": "read",
        "harness": {"agent": "api.test_documents:Sender", "options": options},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "completed"},
    }


def text_of(folder: Path, sample: Sample) -> str:
    return Tokenizer.load(folder).decode(sample.ids.tolist())


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_model_without_images_reads_the_texts_of_the_pages(tmp_path: Path, dialect: str) -> None:
    async with vision_service(tmp_path, [say("one"), say("two")], image_tokens=0) as (_, client, engine):
        sample = await sample_of(client, task(dialect, ["read", "and on"]))
        assert SHOWN in text_of(tmp_path / "vision", sample)
        assert sample.images == ()
        # There is one row: the second request continues the first, although the document is sent again.
        assert len(sample.turns) == len(engine.requests) == 2
        second = engine.requests[1].input_ids.tolist()
        assert sample.ids.tolist()[: len(second)] == second


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_model_with_images_sees_the_pages(tmp_path: Path, dialect: str) -> None:
    async with vision_service(tmp_path, [say("one"), say("two")], image_tokens=80) as (_, client, engine):
        sample = await sample_of(client, task(dialect, ["read", "and on"]))
        pages = [(await client.image(image.digest)).data for image in sample.images]
        assert [page[:4] for page in pages] == [b"\x89PNG"] * 2
        check_images(tmp_path / "vision", sample, pages)
        text = text_of(tmp_path / "vision", sample)
        assert text.index('<page number="1">') < text.index("<|image_pad|>") < text.index('<page number="2">')
        assert "words" not in text
        assert len(sample.turns) == 2
        first, second = engine.requests
        assert sent_spans(first) == sent_spans(second)


@pytest.mark.parametrize("image_tokens", [0, 80])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_document_in_a_tools_result_is_read(tmp_path: Path, dialect: str, image_tokens: int) -> None:
    async with vision_service(tmp_path, [CALL, say("done")], image_tokens=image_tokens) as (_, client, _engine):
        sample = await sample_of(client, task(dialect, ["read", "tool"]))
        text = text_of(tmp_path / "vision", sample)
        response = text.partition("<tool_response>")[2].partition("</tool_response>")[0]
        assert '<page number="2">' in response
        assert ("second words" in response) == (not image_tokens)
        assert len(sample.images) == (2 if image_tokens else 0)


@pytest.mark.parametrize("image_tokens", [0, 80])
async def test_the_tokens_of_a_document_can_be_counted_before_the_call(tmp_path: Path, image_tokens: int) -> None:
    COUNTS.clear()
    async with vision_service(tmp_path, [say("one"), say("two")], image_tokens=image_tokens) as (_, client, engine):
        await sample_of(client, task("messages", ["read", "and on"]))
        assert [count["input_tokens"] for count in COUNTS] == [len(request.input_ids) for request in engine.requests]


async def test_the_title_and_the_context_of_a_document_are_shown(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [say("one")], image_tokens=0) as (_, client, engine):
        asked = task("messages", ["read"])
        asked["harness"]["agent"] = "api.test_documents:TitledSender"
        sample = await sample_of(client, asked)
        assert "<document>\nThe title\nIts context\n<page number=" in text_of(tmp_path / "vision", sample)
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"%PDF-1.7 and so on", "the document cannot be read"),
        (pdf([""]), "the document has no text"),
        (pdf(["x"] * 101), "the document has 101 pages"),
    ],
)
async def test_what_cannot_be_read_is_refused_and_a_tools_is_described(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    async with vision_service(tmp_path, [CALL, say("done")], image_tokens=0) as (_, client, engine):
        refused = await refusal_of(client, task("messages", ["read"], data))
        assert refused.startswith("400")
        assert reason in refused
        assert not engine.requests
        sample = await sample_of(client, task("messages", ["read", "tool"], data))
        assert "[application/pdf: the document cannot be read]" in text_of(tmp_path / "vision", sample)
        [_, turn] = await client.turns(sample.session_id)
        assert turn.ignored == ("results.application/pdf",)


async def test_without_the_extra_documents_are_refused_and_a_tools_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_backends, "has_pdfium", lambda: False)
    async with vision_service(tmp_path, [CALL, say("done")]) as (_, client, engine):
        for dialect in PATHS:
            assert (await refusal_of(client, task(dialect, ["read"]))).startswith("400")
        assert not engine.requests
        sample = await sample_of(client, task("responses", ["read", "tool"]))
        assert "bytes: this model does not read such files]" in text_of(tmp_path / "vision", sample)


async def test_a_reader_that_fails_is_an_error_of_the_service_and_no_reward(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [say("one")], kind=ScriptedEngine) as (_, client, engine):
        await sample_of(client, task("chat", ["read"]))
        kill_decoders()
        error = await error_of(client, task("chat", ["read"], pdf(["other words"])))
        assert error.code == "service_error"
        assert "the process that decodes images failed" in error.message
        assert len(engine.requests) == 1


async def test_a_server_that_takes_messages_is_sent_the_texts_of_the_pages(tmp_path: Path) -> None:
    async with picture_service(tmp_path) as (_, url, server), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task("messages", ["read", "and on"])})).id])
        assert done.sessions[0].last_error is None
    for _, body in server.posts[-2:]:
        assert SHOWN in str(body["messages"][0]["content"]).replace("\\n", "\n")
