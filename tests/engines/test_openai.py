"""The adapter for OpenAI-compatible servers: its requests, replies with and without token ids, and typed errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.upstream import Answer, upstream
from engines.worlds import HASTY
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.adapters.openai import OpenAIEngine
from outrider.engines.base import ChatChunk, ChatRequest, EngineOptions, SamplingParams
from outrider.errors import ContextOverflow, EngineError, EngineRejected, EngineUnavailable, InvalidField
from outrider.lab.fakes.engine_servers.app import serving
from outrider.messages import Message, Role, Text, ToolCall, image_from_bytes, image_from_url
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan
from support.nemo_rl_server import NemoRLServer
from support.tokenizer import write_tokenizer

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
REQUEST = ChatRequest(
    request_id="r1",
    session_key="s1",
    messages=(
        Message(role=Role.USER, content="hi"),
        Message(role=Role.ASSISTANT, reasoning="hm", tool_calls=(ToolCall("c1", "bash", '{"x":  1}'),)),
        Message(role=Role.TOOL, content="out", tool_call_id="c1"),
    ),
    tools=(TOOL,),
    sampling=SamplingParams(max_tokens=9, top_k=3, seed=4, stop=("x",)),
)
PAGES = {"/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}}


def event(delta: dict[str, Any], finish: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | choice]}


def call(index: int, **function: str) -> dict[str, Any]:
    call_id = {"id": f"call{index}"} if "name" in function else {}
    return {"tool_calls": [{"index": index, "function": function} | call_id]}


async def chat(url: str, request: ChatRequest = REQUEST, **options: Any) -> list[ChatChunk]:
    engine = OpenAIEngine(EngineOptions(name="e", url=f"{url}/v1", options=options), retry=HASTY)
    await engine.start()
    try:
        assert (await engine.health()).model == "m"
        return [chunk async for chunk in engine.chat(request)]
    finally:
        await engine.close()


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": value} for value in values]}


async def test_a_captured_reply_is_put_together() -> None:
    events = [
        event({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]},
        event({"reasoning_content": "think"}, token_ids=[3], logprobs=logprobs(-0.5)),
        event({"content": "I "}, token_ids=[4], logprobs=logprobs(-0.25)),
        event({"content": "do"}, token_ids=[5, 6], logprobs=logprobs(-1.0, -2.0)),
        event({}, token_ids=[7], logprobs=logprobs(-3.0)),
        event(call(0, name="bash", arguments="")),
        event(call(0, arguments='{"a":')),
        event(call(1, name="other", arguments="{}")),
        event(call(0, arguments=" 1}")),
        event({}, "tool_calls", weight_versions=[{"version": "4", "start": 0, "end": 5}]),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5, "details": None}},
    ]
    async with upstream(Answer(events=events), pages=PAGES) as (url, server):
        chunks = await chat(url)
    assert [(chunk.text, chunk.reasoning) for chunk in chunks[:-1]] == [("", "think"), ("I ", ""), ("do", "")]
    last = chunks[-1]
    assert last.reply == Message(
        role=Role.ASSISTANT,
        content="I do",
        reasoning="think",
        tool_calls=(ToolCall("call0", "bash", '{"a": 1}'), ToolCall("call1", "other", "{}")),
    )
    assert last.finish is FinishReason.STOP
    assert (last.prompt_ids, last.output_ids) == ([1, 2], [3, 4, 5, 6, 7])
    assert last.logprobs == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert last.versions == (VersionSpan(4, 0, 5),)
    assert last.usage == {"prompt_tokens": 2, "completion_tokens": 5}
    path, body = server.posts[0]
    assert path == "/v1/chat/completions"
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"x":  1}'}
    assert body["messages"][1]["reasoning_content"] == "hm"
    assert body["messages"][2] == {"role": "tool", "content": "out", "tool_call_id": "c1"}
    assert body["tools"] == [TOOL]
    assert (body["return_token_ids"], body["logprobs"], body["top_k"], body["seed"]) == (True, True, 3, 4)


async def test_a_server_without_labels_serves_the_version_it_is_told() -> None:
    choice: dict[str, Any] = {"token_ids": [3], "logprobs": logprobs(-0.5)}
    events = [
        event({"content": "a"}, **choice) | {"prompt_token_ids": [1]},
        event({"content": "b"}, "stop", weight_versions=[{"version": "default", "start": 0, "end": 2}], **choice),
    ]
    async with upstream(Answer(events=events), pages=PAGES) as (url, _):
        engine = OpenAIEngine(EngineOptions(name="e", url=url), retry=HASTY)
        await engine.start()
        await engine.set_version(6)
        last = [chunk async for chunk in engine.chat(REQUEST)][-1]
        await engine.close()
    assert last.versions == (VersionSpan(6, 0, 2),)


@pytest.mark.parametrize(
    "missing",
    [{"token_ids": None}, {"logprobs": None}],
    ids=["no ids", "no log-probabilities"],
)
async def test_a_reply_without_ids_or_logprobs_is_text(missing: dict[str, Any]) -> None:
    choice: dict[str, Any] = {"token_ids": [3], "logprobs": logprobs(-0.5)} | missing
    events = [event({"content": "yes"}, "stop", **choice) | {"prompt_token_ids": [1]}]
    async with upstream(Answer(events=events), pages=PAGES) as (url, _):
        last = (await chat(url))[-1]
    assert last.output_ids is None
    assert last.logprobs is None
    assert last.reply == Message(role=Role.ASSISTANT, content="yes")


async def test_a_text_server_is_asked_for_nothing_unusual() -> None:
    events = [event({"content": "yes"}, "length", token_ids=[3], logprobs=logprobs(-1.0)) | {"prompt_token_ids": [1]}]
    async with upstream(Answer(events=events), pages=PAGES) as (url, server):
        last = (await chat(url, ids=False))[-1]
    assert last.output_ids is None
    assert last.finish is FinishReason.LENGTH
    body = server.posts[0][1]
    assert set(body) == {
        *("model", "messages", "max_tokens", "temperature", "top_p", "stream", "stream_options", "tools", "stop"),
        "seed",
    }
    assert "reasoning_content" not in body["messages"][1]


@pytest.mark.parametrize("values", [(-0.5,), (-0.5, -9999.0), (-0.5, -1.0, -1.0)])
async def test_logprobs_must_match_the_ids(values: tuple[float, ...]) -> None:
    events = [event({"content": "x"}, "stop", token_ids=[3, 4], logprobs=logprobs(*values)) | {"prompt_token_ids": [1]}]
    async with upstream(Answer(events=events), pages=PAGES) as (url, _):
        with pytest.raises(EngineError, match="log-probabilities for 2"):
            await chat(url)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(503), EngineUnavailable),
        (Answer(400), EngineRejected),
        (Answer(events=[event({"content": "x"})]), EngineUnavailable),
        (Answer(events=[event({"content": "x"})], cut=True), EngineUnavailable),
        (Answer(events=[event({}, "content_filter")]), EngineError),
        (Answer(events=[{"error": {"message": "asked 99 of 64", "code": 400}}]), ContextOverflow),
    ],
)
async def test_failures_are_typed(answer: Answer, expected: type[EngineError]) -> None:
    async with upstream(answer, pages=PAGES) as (url, _):
        with pytest.raises(expected):
            await chat(url)


def test_the_mode_says_what_is_asked_for() -> None:
    capture = OpenAIEngine(EngineOptions(name="e", url="http://h"))
    text = OpenAIEngine(EngineOptions(name="e", url="http://h", options={"ids": False}))
    assert (capture.mode, capture.logprob_kind) == (TokenMode.CAPTURE, LogprobKind.RAW)
    assert (text.mode, text.logprob_kind) == (TokenMode.TEXT, LogprobKind.NONE)


async def test_images_are_sent_as_parts() -> None:
    parts = (Text("what is"), image_from_bytes("image/png", b"hi"), image_from_url("https://example.org/x.png"))
    asked = msgspec.structs.replace(REQUEST, messages=(Message(role=Role.USER, content="what is", parts=parts),))
    async with upstream(Answer(events=[event({"content": "x"}, "stop")]), pages=PAGES) as (url, server):
        await chat(url, asked)
    assert server.posts[0][1]["messages"][0]["content"] == [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
    ]


ALTERED = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={7: 1.0},
    constraint=Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
)
REPLIED = Answer(events=[event({"content": "b"}, "stop")])


async def test_what_alters_sampling_is_asked_for_in_openais_words_and_of_vllm_in_its_own() -> None:
    altered = msgspec.structs.replace(REQUEST, sampling=ALTERED, thinking=False)
    async with upstream(REPLIED, REPLIED, pages=PAGES) as (url, server):
        await chat(url, altered)
        await chat(url, altered, ids=False)
    (_, capture), (_, text) = server.posts
    for body in (capture, text):
        assert (body["presence_penalty"], body["frequency_penalty"], body["logit_bias"]) == (0.5, 0.25, {"7": 1.0})
        form = body["response_format"]
        assert (form["type"], form["json_schema"]["schema"]) == ("json_schema", {"type": "object"})
    assert (capture["repetition_penalty"], capture["min_tokens"]) == (1.5, 2)
    assert capture["chat_template_kwargs"] == {"enable_thinking": False}
    assert not text.keys() & {"repetition_penalty", "min_tokens", "chat_template_kwargs"}


async def test_forms_that_openai_does_not_have_are_for_vllm_alone() -> None:
    regex = Constraint(ConstraintKind.REGEX, "a|b")
    altered = msgspec.structs.replace(REQUEST, sampling=SamplingParams(max_tokens=9, constraint=regex))
    async with upstream(REPLIED, pages=PAGES) as (url, server):
        await chat(url, altered)
    assert server.posts[0][1]["structured_outputs"] == {"regex": "a|b"}
    plain = OpenAIEngine(EngineOptions(name="e", url="http://x", options={"ids": False}))
    assert plain.constraints == {ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA, ConstraintKind.TOOL_CALLS}


async def test_forced_calls_use_openais_field() -> None:
    forced = Constraint(ConstraintKind.TOOL_CALLS, '"required"')
    altered = msgspec.structs.replace(REQUEST, sampling=SamplingParams(max_tokens=9, constraint=forced))
    async with upstream(REPLIED, pages=PAGES) as (url, server):
        await chat(url, altered)
    assert server.posts[0][1]["tool_choice"] == "required"
    assert "structured_outputs" not in server.posts[0][1]


async def test_a_server_of_nemo_rl_lists_no_models_and_keeps_the_ids_that_it_reported(tmp_path: Path) -> None:
    server = NemoRLServer(Tokenizer.load(write_tokenizer(tmp_path)), temperature=1.0)
    first, said = Message(role=Role.USER, content="hi"), Message(role=Role.ASSISTANT, content="hello world")
    request = msgspec.structs.replace(REQUEST, messages=(first,), tools=(), sampling=SamplingParams(max_tokens=9))
    after = msgspec.structs.replace(request, messages=(first, said, first))
    async with serving(server) as url:
        engine = OpenAIEngine(
            EngineOptions(name="e", url=f"{url}/v1", model="m", options={"nemo_rl": True}), retry=HASTY
        )
        await engine.start()
        health = await engine.health()
        one = [chunk async for chunk in engine.chat(request)][-1]
        seen = [*(one.prompt_ids or []), *(one.output_ids or [])]
        drifted = [chunk async for chunk in engine.chat(after)][-1]
        kept = [chunk async for chunk in engine.chat(msgspec.structs.replace(after, known_ids=seen))][-1]
        await engine.close()
    assert (health.ok, health.model, health.context_tokens) == (True, "m", 4096)
    assert (drifted.prompt_ids or [])[: len(seen)] != seen
    assert (kept.prompt_ids or [])[: len(seen)] == seen
    with pytest.raises(InvalidField, match="needs a model"):
        OpenAIEngine(EngineOptions(name="e", url=url, options={"nemo_rl": True}))
