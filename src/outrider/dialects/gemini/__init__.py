"""Google generateContent, streamed and not: its routes, and the `Dialect` built from request, reply and stream.

Invariant: a streamed reply and a whole reply carry the same message.

The dialect's paths are all of `/v1beta/` and `/v1alpha/`, and the methods of models under `/v1/models/`. The models of
`/v1` are listed in this dialect for a client that sends its key in Google's header.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outrider.dialects.base import Action, Completion, Memory, ModelRequest, WireCall
from outrider.dialects.gemini.reply import RESOURCE, error_object, model_object, reply_object
from outrider.dialects.gemini.request import GeminiContext, parse_count, parse_request
from outrider.dialects.gemini.stream import GeminiStream
from outrider.dialects.json import quoted
from outrider.errors import NotFound, OutriderError

KEY_HEADER = b"x-goog-api-key"
STREAM = "streamGenerateContent"
METHODS = {"generateContent": Action.GENERATE, STREAM: Action.GENERATE, "countTokens": Action.COUNT_TOKENS}

_OWN_VERSIONS = ("/v1beta/", "/v1alpha/")
_SHARED_VERSION = "/v1/"


class GeminiDialect:
    """`Dialect` of `POST .../models/{model}:{method}` and `GET .../models`. A session's memory holds its parsed tools
    and its `history.HistoryMemory`."""

    name = "gemini"

    def action(self, call: WireCall) -> Action | None:
        resource = _resource(call)
        if resource is None:
            return None
        action = None
        if call.method == "GET":
            action = Action.MODELS if resource == "models" else None
            action = Action.MODEL if resource.startswith(RESOURCE) else action
        elif call.method == "POST" and resource.startswith(RESOURCE):
            method = _method(resource)
            action = METHODS.get(method.verb) if method.model else None
        if action is None:
            raise NotFound(f"{call.method} {call.path} is not served here")
        return action

    def model(self, call: WireCall, body: bytes) -> str | None:
        return _method(_resource(call) or "").model

    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
        method = _method(_resource(call) or "")
        if METHODS.get(method.verb) is Action.COUNT_TOKENS:
            return parse_count(call, method.model, body, memory)
        return parse_request(call, method.model, body, memory, stream=method.verb == STREAM)

    def reply(self, request: ModelRequest, completion: Completion) -> bytes:
        context: GeminiContext = request.reply_context
        context.history.answered(completion.reply)
        return msgspec.json.encode(reply_object(completion, thoughts=context.thoughts))

    def stream(self, request: ModelRequest) -> GeminiStream:
        context: GeminiContext = request.reply_context
        return GeminiStream(context.history.answered, thoughts=context.thoughts, events=context.events)

    def count(self, request: ModelRequest, tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": tokens})

    def error(self, error: OutriderError) -> tuple[int, bytes]:
        return error.http_status, msgspec.json.encode(error_object(error))

    def models(self, call: WireCall, contexts: Mapping[str, int | None]) -> bytes:
        resource = _resource(call) or ""
        if not resource.startswith(RESOURCE):
            return msgspec.json.encode({"models": [model_object(*named) for named in contexts.items()]})
        wanted = _model_name(resource)
        if wanted not in contexts:
            raise NotFound(f"the model {quoted(wanted)} does not exist", field="name")
        return msgspec.json.encode(model_object(wanted, contexts[wanted]))


class _Method(msgspec.Struct, frozen=True):
    """The two parts of `models/{model}:{verb}`."""

    model: str
    verb: str


def _resource(call: WireCall) -> str | None:
    """The path after the version; None for a path outside this dialect."""
    for version in _OWN_VERSIONS:
        if call.path.startswith(version):
            return call.path.removeprefix(version)
    resource = call.path.removeprefix(_SHARED_VERSION)
    if not call.path.startswith(_SHARED_VERSION) or not f"{resource}/".startswith(RESOURCE):
        return None
    # OpenAI also has `/v1/models`. A request for models is Google's if it sends its key in Google's header. A call of a
    # method is Google's if its path has a colon.
    if call.method == "GET":
        return resource if call.header(KEY_HEADER) is not None else None
    return resource if ":" in resource else None


def _method(resource: str) -> _Method:
    model, _, verb = _model_name(resource).rpartition(":")
    return _Method(model, verb)


def _model_name(resource: str) -> str:
    """A resource without `models/`, which some clients write twice."""
    return resource.removeprefix(RESOURCE).removeprefix(RESOURCE)
