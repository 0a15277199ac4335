"""Google generateContent for the fuzzer: a grammar of its requests, and a strict reader of its replies."""

from __future__ import annotations

import json
import re
from typing import Any

from support.fuzz.grammar import Grammar, Writer
from support.fuzz.speaker import (
    Body,
    Called,
    Echo,
    Manner,
    Request,
    Said,
    check,
    decoded,
    decoded_object,
    events_of,
    one_of,
    respelled,
    same_keys,
    without,
)

SNAKE = re.compile(r"(?<=[a-z])[A-Z]")
METHODS = {
    "": "generateContent",
    "sse": "streamGenerateContent",
    "array": "streamGenerateContent",
    "count": "countTokens",
}
OWN_WORDS = frozenset({"args", "response", "parameters", "parametersJsonSchema"})
"""In the values of these keys, the keys of objects are the user's own."""


GRAMMAR: Grammar = {
    "body": {
        "contents": ["opening", "opening", "opening", "quoted", "user"],
        "systemInstruction~": ["sentence", {"parts": "told+", "role?": "word"}, "told"],
        "tools~": ["tool*", "tool+", "tool"],
        "toolConfig?": {"functionCallingConfig": {"mode~": ["'AUTO", "'ANY", "'NONE", "'any", None]}},
        "generationConfig~": "generation",
        "safetySettings?": "json",
        "labels?": "object",
        "cachedContent?": "'",
        "xUnknown?": "json",
    },
    "opening": ("user", "user?"),
    "quoted": ("exchange", "exchange~", "user"),
    "exchange": ("user", "model", "answers"),
    "user": {"role~": ["'user", "'user", "'function", "'", None], "parts": ["seen+", "seen", "seen*"]},
    "model": {"role": "'model", "parts": ["spoken+", "spoken*"]},
    "answers": {"role": ["'user", "'function"], "parts": "answer+"},
    "seen": ["told", "told", "told", "told", "told", "told", "rarely"],
    "told": {"text": "text"},
    "rarely": [
        {"inlineData": {"mimeType": "image_type", "data": "pixel"}},
        {"fileData": {"fileUri": "'https://example.org/x.png", "mimeType~": "image_type"}},
    ],
    "spoken": ["told", "call", "call", {"text": "text", "thought": True}, {"thoughtSignature": "signature"}],
    "call": {"functionCall": {"name": "name", "args~": "object", "id~": "id"}, "thoughtSignature?": "signature"},
    "signature": ["'skip_thought_signature_validator", "'b3V0cmlkZXI6Y2FsbF8w", "word", "'!"],
    "answer": ["result", "result", "told"],
    "result": {
        "functionResponse": {
            "name": "name",
            "response~": ["object", {"output": "text"}, {"error": "text"}, {"result": "json"}],
            "id~": "id",
        }
    },
    "generation": {
        "temperature~": "temperature",
        "topP?": "top_p",
        "topK?": "top_k",
        "maxOutputTokens~": "limit",
        "stopSequences?": ["stop*", "stop+", None],
        "seed?": "seed",
        "candidateCount?": [1, 1.0, None],
        "thinkingConfig~": {"includeThoughts~": "flag", "thinkingBudget?": "limit", "thinkingLevel?": "word"},
        "responseMimeType?": "word",
        "responseJsonSchema?": "schema",
    },
    "tool": {"functionDeclarations": ["declaration*", "declaration+", "declaration"]},
    "declaration": ["declared", "declared_json"],
    "declared": {"name": "name", "description~": "text", "parameters~": ["schema", None]},
    "declared_json": {"name": "name", "description~": ["text", None], "parametersJsonSchema": "schema"},
}


class Gemini:
    """The `Speaker` of Google generateContent."""

    name = "gemini"
    history = "contents"
    grammar = GRAMMAR

    def manner(self, writer: Writer) -> Manner:
        form = writer.dice.choice(
            ("", "", "sse", "sse", "sse", "array", "array", *(["count"] if writer.chance(0.5) else []))
        )
        return Manner(form in ("sse", "array"), form)

    def dressed(self, writer: Writer, body: Body) -> Body:
        return snake_case(body) if writer.chance(0.3) else body

    def request(self, manner: Manner, payload: bytes) -> Request:
        path = f"/v1beta/models/policy:{METHODS[manner.form]}"
        return Request(method="POST", path=path, query=b"alt=sse" if manner.form == "sse" else b"", pieces=(payload,))

    def asides(self, writer: Writer) -> Request:
        paths = ("/v1beta/models", "/v1beta/models/policy", "/v1beta/models/x", "/v1beta/files", "/v1beta/")
        return Request(method="GET", path=writer.dice.choice(paths))

    def go_on(self, writer: Writer, body: Body, said: Said, echo: Echo) -> Body:
        kept = [_kept(part, echo) for part in _joined(said.items)]
        if echo is Echo.NO_REASONING:
            kept = [part for part in kept if not part.get("thought")]
        results = [_result(writer, call) for call in said.calls]
        new = [] if results and writer.chance(0.7) else [{"text": writer.write("text")}]
        before = body["contents"] if isinstance(body["contents"], list) else [body["contents"]]
        turns = [{"role": "model", "parts": [part]} for part in kept] if writer.chance(0.2) else None
        turns = turns or [{"role": "model", "parts": kept}]
        return {**body, "contents": [*before, *turns, {"role": "user", "parts": [*results, *new]}]}

    def read(self, payload: bytes, manner: Manner) -> Said:
        if manner.form == "":
            return _said([decoded_object(payload)])
        if manner.form == "array":
            chunks = one_of(decoded(payload), list, "a streamed array")
        else:
            chunks = [decoded_object(event.data) for event in events_of(payload)]
        if chunks and "error" in chunks[-1]:
            self.read_error(chunks[-1]["error"]["code"], json.dumps(chunks[-1]).encode())
            return Said(text="", reasoning=None, failure=chunks[-1]["error"]["message"])
        return _said(chunks)

    def read_count(self, payload: bytes) -> int:
        whole = decoded_object(payload)
        return int(one_of(whole["totalTokens"], int, "totalTokens"))

    def read_error(self, status: int, payload: bytes) -> None:
        whole = decoded_object(payload)
        same_keys(whole, ("error",), "an error's body")
        same_keys(whole["error"], ("code", "message", "status", "details"), "an error")
        check(whole["error"]["code"] == status, f"an error's code {whole['error']['code']} is not its status {status}")
        check(whole["error"]["message"] and isinstance(whole["error"]["message"], str), "an error without a message")


def snake_case(value: Any) -> Any:
    """Return the body with Google's keys in snake_case. Keys of the user stay as they are."""
    if isinstance(value, list):
        return [snake_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        SNAKE.sub(lambda found: f"_{found[0].lower()}", key): item if key in OWN_WORDS else snake_case(item)
        for key, item in value.items()
    }


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of a stream as they are in a reply without streaming: consecutive texts are joined."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and "text" in part and "text" in last and part.get("thought") == last.get("thought"):
            joined[-1] = {**last, "text": last["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _result(writer: Writer, call: Called) -> dict[str, Any]:
    response: dict[str, Any] = {"name": call.name, "response": writer.write([{"output": "text"}, "object"])}
    if writer.chance(0.7):
        response["id"] = call.id if writer.chance(0.8) else f"{call.name}-{call.id}"
    return {"functionResponse": response}


def _kept(part: dict[str, Any], echo: Echo) -> dict[str, Any]:
    """Return a part of a reply as a client sends the part back."""
    if echo is Echo.TRIMMED and "text" in part:
        return {**part, "text": part["text"].strip()}
    if echo is Echo.RESPELLED and "functionCall" in part:
        call = part["functionCall"]
        spelled = {**without(call, "id"), "args": json.loads(respelled(json.dumps(call["args"])))}
        return {**part, "functionCall": spelled}
    return part


def _said(chunks: list[dict[str, Any]]) -> Said:
    check(chunks, "a reply without a chunk")
    check(len({chunk["responseId"] for chunk in chunks}) == 1, "the chunks of one reply have several ids")
    candidates = [chunk["candidates"][0] for chunk in chunks]
    check(all(len(chunk["candidates"]) == 1 for chunk in chunks), "not one candidate")
    finishes = [candidate["finishReason"] for candidate in candidates if "finishReason" in candidate]
    check(len(finishes) == 1 and "finishReason" in candidates[-1], "the finish is not told once, at the end")
    check(finishes[0] in ("STOP", "MAX_TOKENS"), f"finishReason is {finishes[0]!r}")
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    check(all(part for part in parts) and all(c["content"]["parts"] for c in candidates), "empty parts")
    usage = chunks[-1]["usageMetadata"]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return Said(
        text="".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        reasoning="".join(part["text"] for part in parts if part.get("thought")) or None,
        calls=tuple(Called(call["id"], call["name"], json.dumps(one_of(call["args"], dict, "args"))) for call in calls),
        cut=finishes[0] == "MAX_TOKENS",
        prompt_tokens=usage["promptTokenCount"],
        output_tokens=usage["candidatesTokenCount"],
        id=chunks[0]["responseId"],
        items=parts,
    )
