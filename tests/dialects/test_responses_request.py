"""Responses requests: routes, fields, callers, refusals, and stored responses."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from outrider.dialects.base import Action, Caller, WireCall
from outrider.dialects.reading import MAX_TOKENS
from outrider.dialects.responses.stored_items import MAX_STORED, PreviousResponseNotFound, store_of
from outrider.errors import NotFound, RequestError
from outrider.messages import Message, Role
from support.responses import CALL, DIALECT, USER, body, completion, messages_of, parse, read, replied
from support.wire import action_of


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("POST", "/v1/responses", Action.GENERATE),
        ("POST", "/v1/responses/input_tokens", Action.COUNT_TOKENS),
        ("POST", "/v1/chat/completions", None),
        ("POST", "/v1/responsesx", None),
    ],
)
def test_routes(method: str, path: str, action: Action | None) -> None:
    assert action_of(DIALECT, WireCall(method, path)) is action


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/compact"),
        ("POST", "/v1/responses/"),
    ],
)
def test_a_route_of_the_api_that_is_not_served(method: str, path: str) -> None:
    assert action_of(DIALECT, WireCall(method, path)) == "not served"


def test_models_are_not_listed_here() -> None:
    with pytest.raises(NotFound):
        DIALECT.models(WireCall("GET", "/v1/models"), {"m": None})


def test_tokens_are_counted_without_a_model_being_named() -> None:
    call = WireCall("POST", "/v1/responses/input_tokens")
    request = DIALECT.parse(call, b'{"input": "hi"}', {})
    assert messages_of(request) == [Message(role=Role.USER, content="hi")]
    assert DIALECT.count(12) == {"object": "response.input_tokens", "input_tokens": 12}


def test_text_is_a_user_message() -> None:
    assert messages_of(parse(input="hi")) == [Message(role=Role.USER, content="hi")]


def test_instructions_are_the_first_system_message() -> None:
    assert read({"role": "developer", "content": "d"}, USER, instructions="Be brief.") == [
        Message(role=Role.SYSTEM, content="Be brief."),
        Message(role=Role.SYSTEM, content="d"),
        Message(role=Role.USER, content="hi"),
    ]
    assert len(read(USER, instructions="")) == 1


FIELDS = [
    ("model", {"model": None}),
    ("model", {"model": 5}),
    ("input", {"input": []}),
    ("input", {"input": None, "instructions": "x"}),
    ("input", {"input": [{"type": "additional_tools", "tools": []}]}),
    ("input", {"input": {}}),
    ("input[1]", {"input": [USER, "hi"]}),
    ("input[1].type", {"input": [USER, {"type": "shell_call"}]}),
    ("input[0].type", {"input": [{"type": 5}]}),
    ("input[1].role", {"input": [USER, {"role": "tool", "content": "x"}]}),
    ("input[0].id", {"input": [{"type": "item_reference"}]}),
    ("input[0].id", {"input": [{"id": "msg_1"}]}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("include", {"include": ["message.output_text.logprobs"]}),
    ("metadata[...]", {"metadata": {"a": 1}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 0}),
    ("reasoning", {"reasoning": "high"}),
    ("text.format", {"text": {"format": "json"}}),
    ("text.format.type", {"text": {"format": json.loads('{"a":' * 80 + "1" + "}" * 80)}}),
    ("tool_choice", {"tool_choice": "always"}),
    ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
    ("tool_choice.type", {"tool_choice": {}}),
    ("tool_choice.type", {"tool_choice": {"type": {}, "name": "f"}}),
    ("tool_choice.tools[0].type", {"tool_choice": {"type": "allowed_tools", "tools": [{"type": []}]}}),
    ("tool_choice.name", {"tool_choice": {"type": "function", "name": "f"}}),
    ("previous_response_id", {"previous_response_id": "resp_none"}),
]


@pytest.mark.parametrize(("field", "fields"), FIELDS, ids=[f"{n}-{field}" for n, (field, _) in enumerate(FIELDS)])
def test_a_wrong_field_is_named(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("data", [b"", b"null", b"[]", body()[:-1], b'{"model":"m","input":' + b"[" * 200_000])
def test_a_body_that_is_not_a_request_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        DIALECT.parse(CALL, data, {})


def test_what_only_tunes_a_server_is_tolerated() -> None:
    request = parse(
        truncation="auto",
        service_tier="flex",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        client_metadata={"a": 1},
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        reasoning={"effort": "high", "context": "all_turns"},
        text={"verbosity": "low"},
        stream_options={"include_obfuscation": True},
        context_management=[{"type": "compaction"}],
        top_logprobs=0,
        return_token_ids=None,
    )
    echoed = replied(request, completion("x"))
    assert (echoed["truncation"], echoed["service_tier"]) == ("disabled", "default")
    assert (echoed["prompt_cache_key"], echoed["safety_identifier"]) == ("k", "s")


def test_nulls_leave_the_choice_to_the_server() -> None:
    names = ["instructions", "previous_response_id", "store", "stream", "background", "conversation", "prompt", "tools"]
    names += ["tool_choice", "parallel_tool_calls", "reasoning", "text", "include", "metadata", "user", "temperature"]
    names += ["top_p", "max_output_tokens"]
    assert replied(parse(**dict.fromkeys(names)), completion("x")) == replied(parse(), completion("x"))


def test_sampling() -> None:
    asked = parse(temperature=0.5, top_p=0.9, max_output_tokens=1 << 70).sampling
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.5, 0.9, MAX_TOKENS)


def test_the_response_repeats_its_request() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "store": False,
        "temperature": 0.25,
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": {"z": 1, "a": 2}, "strict": True}],
        "top_p": 0.5,
        "user": "u",
    }
    echoed = replied(parse(**asked, reasoning={"effort": "low"}), completion("x"))
    assert {name: echoed[name] for name in asked} == asked
    assert list(echoed["tools"][0]["parameters"]) == ["z", "a"]
    assert echoed["reasoning"] == {"effort": "low", "summary": None}


def head(**headers: str) -> WireCall:
    return WireCall(
        "POST", "/v1/responses", headers=[(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    )


@pytest.mark.parametrize(
    ("call", "caller"),
    [
        (CALL, Caller()),
        (head(thread_id="t"), Caller(agent_id="t")),
        (head(x_session_id="configured"), Caller()),
        (head(x_session_id="s", x_parent_session_id="p"), Caller(agent_id="s", parent_id="p")),
        (
            head(thread_id="t", x_codex_parent_thread_id="p", x_openai_subagent="review"),
            Caller(agent_id="t", parent_id="p", purpose="review"),
        ),
        (head(x_codex_turn_metadata='{"request_kind":"turn"}'), Caller()),
        (head(x_codex_turn_metadata='{"request_kind":"compaction"}'), Caller(purpose="compaction")),
        (head(x_codex_turn_metadata="{"), Caller()),
        (head(x_codex_turn_metadata="[]"), Caller()),
    ],
)
def test_the_caller_as_headers_tell(call: WireCall, caller: Caller) -> None:
    assert DIALECT.parse(call, body(), {}).caller == caller


def test_a_previous_response_stands_for_its_whole_conversation() -> None:
    memory: dict[str, Any] = {}
    first = replied(parse(memory, instructions="One."), completion("hello", id="1"))
    second = replied(
        parse(memory, previous_response_id=first["id"], input=[{"role": "user", "content": "again"}]),
        completion("hello again", id="2"),
    )
    third = parse(memory, previous_response_id=second["id"], instructions="Three.")
    assert [(message.role, message.content) for message in messages_of(third)] == [
        ("system", "Three."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "again"),
        ("assistant", "hello again"),
        ("user", "hi"),
    ]
    fork = parse(memory, previous_response_id=first["id"])
    assert len(fork.messages) == 3


def test_additional_tools_are_part_of_a_stored_conversation() -> None:
    memory: dict[str, Any] = {}
    items = [{"type": "additional_tools", "tools": [{"type": "function", "name": name}]} for name in ("f", "g")]
    first = replied(parse(memory, input=[*items, USER]), completion("x"))
    later = parse(memory, previous_response_id=first["id"])
    assert [tool["function"]["name"] for tool in later.tools] == ["f", "g"]


@pytest.mark.deep
@pytest.mark.parametrize("whole", [True, False], ids=["whole histories", "previous responses"])
def test_stored_responses_cost_their_new_items_only(whole: bool) -> None:
    def bytes_of(rounds: int) -> int:
        memory: dict[str, Any] = {}
        items: list[dict[str, Any]] = []
        previous: str | None = None
        before, _ = tracemalloc.get_traced_memory()
        for number in range(rounds):
            items = [*(items if whole else ()), {"role": "user", "content": f"question {number}"}]
            request = parse(memory, input=items, previous_response_id=None if whole else previous)
            response = replied(request, completion(f"answer {number}", id=str(number)))
            items, previous = [*items, *response["output"]], response["id"]
        del items, request, response
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        bytes_of(10)  # the first calls of a process import modules and fill caches
        assert bytes_of(160) < 2.5 * bytes_of(80)
    finally:
        tracemalloc.stop()


def test_replies_count_as_stored_and_the_newest_can_be_continued() -> None:
    memory: dict[str, Any] = {}
    long = "x" * (MAX_STORED // 4)
    ids: list[str] = []
    for number in range(5):
        request = parse(memory, previous_response_id=ids[-1] if ids else None)
        ids.append(replied(request, completion(f"{number} {long}", id=str(number)))["id"])
    with pytest.raises(PreviousResponseNotFound):
        parse(memory, previous_response_id=ids[0])
    assert len(messages_of(parse(memory, previous_response_id=ids[-1]))) == 11


def test_a_reply_that_is_sent_back_is_kept_once() -> None:
    memory: dict[str, Any] = {}
    sent = replied(parse(memory), completion("hello"))["output"]
    size = store_of(memory)._size
    later = DIALECT.parse(CALL, msgspec.json.encode({"model": "m", "input": [USER, *sent]}), memory)
    assert store_of(memory)._size == size
    assert messages_of(later)[1].content == "hello"


def test_a_response_is_stored_for_its_session_only_and_only_when_it_may_be() -> None:
    memory: dict[str, Any] = {}
    kept = replied(parse(memory), completion("x", id="1"))
    dropped = replied(parse(memory, store=False), completion("x", id="2"))
    for elsewhere, id in (({}, kept["id"]), (memory, dropped["id"])):
        with pytest.raises(PreviousResponseNotFound) as caught:
            parse(elsewhere, previous_response_id=id)
        error = DIALECT.error(caught.value)["error"]
        assert error == {
            "message": f"Previous response with id '{id}' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }
        assert caught.value.http_status == 400


def test_an_item_of_a_response_that_was_not_stored_cannot_be_referred_to() -> None:
    memory: dict[str, Any] = {}
    (item,) = replied(parse(memory, store=False), completion("x"))["output"]
    with pytest.raises(RequestError) as caught:
        parse(memory, input=[USER, {"type": "item_reference", "id": item["id"]}])
    assert caught.value.field == "input[1].id"


def test_old_items_are_not_decoded_until_they_are_asked_for() -> None:
    request = parse(input=[{"role": "user", "content": 5}, {**USER, "id": "msg_1", "status": "completed"}])
    assert request.messages.raw(1) == parse(input=[USER]).messages.raw(0)
    assert request.messages.parse(1) == Message(role=Role.USER, content="hi")
    with pytest.raises(RequestError) as caught:
        request.messages.parse(0)
    assert caught.value.field == "input[0].content"
