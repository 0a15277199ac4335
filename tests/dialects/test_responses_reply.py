"""Responses replies, streamed and not: items, ids, usage, order of events, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.dialects.base import Opening
from outrider.dialects.responses.round_trip import seal
from outrider.errors import ContextOverflow, EngineUnavailable, NotFound, OutriderError, RequestError
from outrider.messages import Delta, ToolCall
from outrider.trajectory import FinishReason
from support.responses import DIALECT, TOOLS, completion, events, parse, replied, streamed

SUMMARY = {"reasoning": {"summary": "auto"}}
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}


class Limited(RequestError):
    code = "limited_in_test_responses_reply"
    http_status = 429


def types(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


def test_usage_and_ids() -> None:
    whole = replied(parse(), completion("hello"))
    assert whole["id"] == "resp_0123"
    assert whole["output"][0]["id"] == "msg_0123_0"
    assert whole["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


def test_an_id_that_has_the_apis_form_keeps_it() -> None:
    assert replied(parse(), completion("hello", id="resp_1"))["id"] == "resp_1"


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT])
def test_a_reply_that_was_cut_off_is_incomplete(finish: FinishReason) -> None:
    whole = replied(parse(), completion("hel", finish=finish))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert streamed(parse(), completion("hel", finish=finish))[-1]["type"] == "response.incomplete"


def test_reasoning_is_content_or_summary_as_asked_and_sealed_when_asked() -> None:
    done = completion("x", reasoning="Hm.")
    plain, summed, sealed = (replied(parse(**asked), done)["output"][0] for asked in ({}, SUMMARY, ENCRYPTED))
    assert (plain["content"], plain["summary"]) == ([{"type": "reasoning_text", "text": "Hm."}], [])
    assert summed["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in summed
    assert "encrypted_content" not in plain
    assert sealed["encrypted_content"] == seal("Hm.")


def test_calls_come_back_as_the_client_knows_their_tools() -> None:
    calls = [
        ToolCall("a", "bash", '{ "cmd":"ls" }'),
        ToolCall("b", "patch", '{"input": "+ x\\n"}'),
        ToolCall("c", "fs__read", "{}"),
        ToolCall("d", "fs__write", '{"input": ""}'),
        ToolCall("e", "nowhere", "{}"),
    ]
    output = replied(parse(tools=TOOLS), completion("", *calls))["output"]
    told = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output]
    assert told == [
        {"type": "function_call", "call_id": "a", "name": "bash", "arguments": '{ "cmd":"ls" }'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "+ x\n"},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}", "namespace": "fs"},
        {"type": "custom_tool_call", "call_id": "d", "name": "write", "input": "", "namespace": "fs"},
        {"type": "function_call", "call_id": "e", "name": "nowhere", "arguments": "{}"},
    ]
    assert [item["id"] for item in output] == ["fc_0123_0", "ctc_0123_1", "fc_0123_2", "ctc_0123_3", "fc_0123_4"]


@pytest.mark.parametrize("arguments", ["{oops", '{"input": 5}', '{"code": "x"}', '{"input": "x", "y": 1}', '"x"'])
def test_a_custom_call_with_other_arguments_hands_them_on_whole(arguments: str) -> None:
    (item,) = replied(parse(tools=TOOLS), completion("", ToolCall("b", "patch", arguments)))["output"]
    assert (item["call_id"], item["input"]) == ("b~json", arguments)


def test_the_order_of_events() -> None:
    done = completion("Hello", ToolCall("a", "bash", "{}"), reasoning="Hm.")
    steps = [Delta(reasoning="H"), Delta(reasoning="m.", text="Hel"), Delta(text="lo"), Delta(ids=[1])]
    assert types(streamed(parse(tools=TOOLS), done, steps)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_reasoning_asked_for_as_a_summary_is_streamed_as_one() -> None:
    told = types(streamed(parse(**SUMMARY), completion("x", reasoning="Hm.")))
    assert told[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]


def test_a_custom_call_is_streamed_as_its_input() -> None:
    told = streamed(parse(tools=TOOLS), completion("", ToolCall("b", "patch", '{"input": "+ x"}')))
    sent = [event for event in told if "custom_tool_call_input" in event["type"]]
    assert [event.get("delta") or event.get("input") for event in sent] == ["+ x", "+ x"]


def test_text_goes_out_with_the_step_that_brings_it() -> None:
    writer = DIALECT.stream(parse(stream=True))
    writer.open(Opening(id="1", created=1, model="m"))
    assert b'"delta":"Hel"' in writer.delta(Delta(text="Hel"))
    said = writer.delta(Delta(text="lo\u2028"))
    assert said.count(b"event: ") == 1
    assert b'"delta":"lo\\u2028"' in said
    assert writer.delta(Delta(ids=[1])) == b""


def test_reasoning_between_texts_is_an_item_between_items() -> None:
    steps = [Delta(text="a"), Delta(reasoning="b"), Delta(text="c")]
    told = streamed(parse(), completion("ac", reasoning="b"), steps)
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["message", "reasoning", "message"]


def test_an_empty_reply_has_an_empty_message() -> None:
    (item,) = streamed(parse(), completion(""))[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_ping_is_a_comment() -> None:
    writer = DIALECT.stream(parse(stream=True))
    assert writer.ping == b": ping\n\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineUnavailable("the engine went away"), "server_error"),
        (ContextOverflow("300 tokens do not fit in 256"), "context_length_exceeded"),
        (Limited("enough"), "rate_limit_exceeded"),
        (NotFound("gone"), "invalid_prompt"),
    ],
)
@pytest.mark.parametrize("opened", [True, False])
def test_an_error_ends_a_stream_as_failed(error: OutriderError, code: str, opened: bool) -> None:
    writer = DIALECT.stream(parse(stream=True))
    if opened:
        writer.open(Opening(id="1", created=1, model="m"))
        writer.delta(Delta(text="Hel"))
    *_, told, failed = (
        json.loads(block.split("data: ")[1]) for block in writer.error(error).decode().split("\n\n")[:-1]
    )
    assert told["type"] == "error"
    assert told["error"]["message"] == told["message"]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": told["message"]}
    assert failed["sequence_number"] == told["sequence_number"] + 1


def test_a_failed_stream_has_the_types_of_the_official_client() -> None:
    writer = DIALECT.stream(parse(stream=True))
    written = writer.open(Opening(id="1", created=1, model="m")) + writer.delta(Delta(text="Hel"))
    assert types(events(written + writer.error(EngineUnavailable("gone"))))[-2:] == ["error", "failed"]


def test_a_response_that_failed_is_not_stored() -> None:
    memory: dict[str, Any] = {}
    writer = DIALECT.stream(parse(memory, stream=True))
    writer.open(Opening(id="1", created=1, model="m"))
    writer.error(EngineUnavailable("gone"))
    with pytest.raises(RequestError):
        parse(memory, previous_response_id="resp_1")


def test_an_overflow_before_the_stream_is_told_by_words_and_code() -> None:
    assert DIALECT.error(ContextOverflow("300 tokens do not fit in 256"))["error"]["code"] == "context_length_exceeded"
