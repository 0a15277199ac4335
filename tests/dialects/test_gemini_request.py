"""Google requests are read into messages, tools and sampling. A refusal names the field that is wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from outrider.dialects.base import Caller, WireCall
from outrider.errors import RequestError
from outrider.messages import Image, Message, Role, Text, ToolCall, image_from_bytes, image_from_url
from support.gemini import (
    ARRAY,
    COUNT,
    DIALECT,
    EVENTS,
    GENERATE,
    answered,
    called,
    messages,
    model,
    read,
    text,
    user,
)

HI = user(text("hi"))
PNG = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(b"\xfb\xff\x00png").decode()}}
IMAGE = image_from_bytes("image/png", b"\xfb\xff\x00png")


@pytest.mark.parametrize(
    ("sent", "system"),
    [
        ("Be brief.", "Be brief."),
        ({"text": "Be brief."}, "Be brief."),
        ({"role": "user", "parts": [text("Be "), text("brief.")]}, "Be brief."),
        ({"role": "anything", "parts": text("Be brief.")}, "Be brief."),
        ([text("Be "), "brief."], "Be brief."),
        ({"parts": []}, ""),
    ],
)
@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_a_system_instruction_in_every_shape(sent: Any, system: str, name: str) -> None:
    assert messages(read(HI, **{name: sent})) == [
        Message(role=Role.SYSTEM, content=system),
        Message(role=Role.USER, content="hi"),
    ]


@pytest.mark.parametrize(
    "contents",
    [HI, [HI], {"parts": [text("hi")]}, [{"role": None, "parts": text("hi")}], {"role": "", "parts": [text("hi")]}],
)
def test_a_user_in_every_shape(contents: Any) -> None:
    request = DIALECT.parse(GENERATE, json.dumps({"contents": contents}).encode(), {})
    assert messages(request) == [Message(role=Role.USER, content="hi")]


def test_what_a_model_said() -> None:
    request = read(
        HI,
        model(
            {"text": "Hm. ", "thought": True},
            {"text": "So.", "thought": True, "thoughtSignature": "c2ln"},
            text("Let me "),
            text("see."),
            {"text": "", "thoughtSignature": "skip_thought_signature_validator"},
            {**called("bash", "a", n=1.5, é="é"), "thoughtSignature": "skip_thought_signature_validator"},
            {"functionCall": {"name": "now"}},
        ),
        user(text("go on")),
    )
    assert messages(request)[1] == Message(
        role=Role.ASSISTANT,
        content="Let me see.",
        reasoning="Hm. So.",
        tool_calls=(ToolCall("a", "bash", r'{"n":1.5,"\u00e9":"\u00e9"}'), ToolCall("call_1", "now", "{}")),
    )


def test_both_spellings_in_one_request() -> None:
    request = read(
        HI,
        model(
            {"function_call": {"name": "look_at", "args": {"the_path": "a_b"}, "id": "x"}, "thoughtSignature": "c2k="}
        ),
        user(
            {"function_response": {"name": "look_at", "response": {"output": "seen"}, "id": "x"}},
            {"inline_data": {"mime_type": "image/png", "data": PNG["inlineData"]["data"]}},
        ),
        generation_config={"max_output_tokens": 5, "topP": 0.5, "stop_sequences": ["END"]},
        tools=[{"function_declarations": [{"name": "look_at", "parameters_json_schema": {"a_b": 1}}]}],
        tool_config={"function_calling_config": {"mode": "AUTO"}},
    )
    assert messages(request)[1:] == [
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall("x", "look_at", '{"the_path":"a_b"}'),)),
        Message(role=Role.TOOL, content="seen", tool_call_id="x", name="look_at"),
        Message(role=Role.USER, parts=(IMAGE,)),
    ]
    assert (request.sampling.max_tokens, request.sampling.top_p, request.sampling.stop) == (5, 0.5, ("END",))
    assert request.tools[0]["function"]["parameters"] == {"a_b": 1}


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "é"}, "é"),
        ({"result": {"n": [1, 2.5]}}, '{"n":[1,2.5]}'),
        ({"output": "x", "error": None}, "x"),
        ({"name": "bash", "content": "from a kit"}, "from a kit"),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": "x", "error": "y"}, '{"output":"x","error":"y"}'),
        ({"name": "other", "content": "x"}, '{"name":"other","content":"x"}'),
        ({"temperature": 7, "unit": "°C"}, '{"temperature":7,"unit":"°C"}'),
        ({"output": None}, '{"output":null}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_what_the_model_is_shown_of_an_answer(response: Any, shown: str) -> None:
    answer = {"functionResponse": {"name": "bash", "id": "a", "response": response}}
    assert messages(read(HI, model(called("bash", "a")), user(answer)))[2].content == shown


def test_one_content_is_as_many_messages_as_it_has_answers() -> None:
    request = read(
        HI,
        model(called("a", "1"), called("b", "2")),
        user(answered("a", "A", "1"), text(""), answered("b", "B", "2"), text("See "), text("this."), PNG),
    )
    assert messages(request)[2:] == [
        Message(role=Role.TOOL, content="A", tool_call_id="1", name="a"),
        Message(role=Role.TOOL, content="B", tool_call_id="2", name="b"),
        Message(role=Role.USER, content="See this.", parts=(Text("See this."), IMAGE)),
    ]


def test_an_answer_can_hold_images() -> None:
    answer = answered("shot", "taken", "1")
    answer["functionResponse"]["parts"] = [PNG, {"fileData": {"fileUri": "https://x/y.png", "mimeType": "image/png"}}]
    message = messages(read(HI, model(called("shot", "1")), {"role": "function", "parts": [answer]}))[2]
    assert message.parts == (Text("taken"), IMAGE, image_from_url("https://x/y.png"))
    assert message.content == "taken"


@pytest.mark.parametrize("data", ["-_8AcG5n", "+/8AcG5n", "+/8AcG5nAA==", "-_8AcG5nAA"])
def test_both_alphabets_of_base64_with_and_without_padding(data: str) -> None:
    [message] = messages(read(user({"inlineData": {"mimeType": "image/png", "data": data}})))
    [image] = message.parts
    assert isinstance(image, Image)
    assert image.data.rstrip(b"\0") == b"\xfb\xff\x00png"


def test_sampling() -> None:
    config = {"temperature": 1, "topP": 0.95, "topK": 64.0, "maxOutputTokens": 1e9, "seed": 7, "candidateCount": 1}
    asked = read(
        HI, generationConfig={**config, "stopSequences": ["A", "B"], "responseMimeType": "text/plain"}
    ).sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (1, 0.95, 64, 7)
    assert (asked.max_tokens, asked.stop) == (1 << 24, ("A", "B"))
    assert read(HI, generationConfig={"topK": 0}).sampling.top_k == -1
    assert read(HI, generationConfig=None).sampling == read(HI).sampling


def test_what_is_tolerated() -> None:
    request = read(
        HI,
        model="models/other",
        safetySettings=[{"category": "X", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        cachedContent="",
        toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}},
        generationConfig={"thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1}, "responseJsonSchema": {}},
        from_the_future={"x": 1},
    )
    assert (request.model, request.tools, request.tools_raw) == ("m", (), b"")


@pytest.mark.parametrize(("call", "streamed"), [(GENERATE, False), (EVENTS, True), (ARRAY, True)])
def test_the_route_says_whether_to_stream(call: WireCall, streamed: bool) -> None:
    assert read(HI, call=call).stream is streamed


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1beta/models/org/model-7b:generateContent", "org/model-7b"),
        ("/v1beta/models/models/m:generateContent", "m"),
        ("/v1alpha/models/a:b:generateContent", "a:b"),
        ("/v1/models/m:generateContent", "m"),
    ],
)
def test_the_model_s_name_is_in_the_path(path: str, name: str) -> None:
    assert read(HI, call=WireCall("POST", path)).model == name


def test_tokens_are_counted_of_contents_or_of_a_whole_request() -> None:
    whole = {
        "model": "models/m",
        "contents": [HI],
        "systemInstruction": "s",
        "tools": {"functionDeclarations": {"name": "f"}},
    }
    bare = read(HI, model(text("x")), call=COUNT)
    assert [message.role for message in messages(bare)] == [Role.USER, Role.ASSISTANT]
    request = DIALECT.parse(COUNT, json.dumps({"generateContentRequest": whole}).encode(), {})
    assert [message.content for message in messages(request)] == ["s", "hi"]
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert DIALECT.count(12) == {"totalTokens": 12}


def test_who_is_calling() -> None:
    headers = [(b"x-session-id", b"child"), (b"x-parent-session-id", b"parent")]
    asked = read(HI, call=WireCall("POST", GENERATE.path, b"", headers))
    assert asked.caller == Caller(agent_id="child", parent_id="parent")
    assert read(HI, call=WireCall("POST", GENERATE.path, b"", headers[:1])).caller == Caller()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents[0]"),
        ({"contents": [HI, model(text("half an answer"))]}, "contents"),
        ({"contents": [{"role": "assistant", "parts": []}]}, "contents[0].role"),
        ({"contents": HI, "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": HI, "generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"contents": HI, "generationConfig": {"temperature": -1}}, "generationConfig.temperature"),
        ({"contents": HI, "generation_config": {"top_k": 1.5}}, "generationConfig.topK"),
        (
            {"contents": HI, "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
        ),
        ({"contents": HI, "systemInstruction": {"parts": [PNG]}}, "systemInstruction[0]"),
        ({"contents": user({"text": 7})}, "contents[0].parts[0].text"),
        (
            {"contents": user({"inlineData": {"mimeType": "application/msword", "data": "AAAA"}})},
            "contents[0].parts[0].inlineData.mimeType",
        ),
        (
            {"contents": user({"inlineData": {"mimeType": "image/png", "data": "A"}})},
            "contents[0].parts[0].inlineData.data",
        ),
        ({"contents": user({"inlineData": {"mimeType": "image/png"}})}, "contents[0].parts[0].inlineData.data"),
        (
            {"contents": user({"fileData": {"fileUri": "files/abc", "mimeType": "image/png"}})},
            "contents[0].parts[0].fileData.fileUri",
        ),
        (
            {"contents": user({"fileData": {"fileUri": "https://x", "mimeType": "video/mp4"}})},
            "contents[0].parts[0].fileData.mimeType",
        ),
        ({"contents": user({"executableCode": {"code": "1"}})}, "contents[0].parts[0].executableCode"),
        ({"contents": user({"executable_code": {"code": "1"}})}, "contents[0].parts[0].executableCode"),
        ({"contents": user(called("bash"))}, "contents[0].parts[0].functionCall"),
        ({"contents": user({"text": "a", **called("bash")})}, "contents[0].parts[0]"),
        ({"contents": [model(answered("a", "b")), HI]}, "contents[0].parts[0].functionResponse"),
        ({"contents": [model(PNG), HI]}, "contents[0].parts[0]"),
        (
            {"contents": [model({"functionCall": {"name": "a", "args": "{}"}}), HI]},
            "contents[0].parts[0].functionCall.args",
        ),
        ({"contents": [model({"functionCall": {"args": {}}}), HI]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": user({"functionResponse": {"name": "a", "response": "b"}})},
            "contents[0].parts[0].functionResponse.response",
        ),
    ],
)
def test_a_wrong_request_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages(DIALECT.parse(GENERATE, json.dumps(body).encode(), {}))
    assert (caught.value.field, caught.value.http_status) == (field, 400)


def test_a_key_that_is_spelled_with_escapes_is_not_overlooked() -> None:
    body = json.dumps({"contents": [HI, user(answered("a", "b"))]}).replace(
        "functionResponse", r"functio\u006eResponse"
    )
    [_, answer] = messages(DIALECT.parse(GENERATE, body.encode(), {}))
    assert answer.role is Role.TOOL
