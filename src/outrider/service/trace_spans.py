"""Builds OpenTelemetry spans from the timelines of a session. All spans of a session are one trace.

Names follow the GenAI semantic conventions (SCHEMA). Traces leave the service, so spans contain no text of agents and
no arguments of commands, except the names of programs, and of servers that have sent something to a sandbox.

Invariants: every span except the root has a parent in the same trace, and is within the trace's time; the ids depend
only on the session, so a trace that is sent twice keeps its ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from outrider.schemas import SessionView, SpanView, TimelineView

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
PROVIDER = "outrider"
TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
NETWORK_DATA = ("phase", "requests", "sent", "received", "refused", "failed")
"""The data of a span of kind `network` that become attributes. The reasons of refusals and failures are left out."""

Attribute = str | int | float | bool | list[str]


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span of a trace. Ids are hexadecimal, and times are nanoseconds since the epoch. `error` is the type of an
    error. `links` are pairs (trace id, span id) of spans in other traces."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start: int
    end: int
    attributes: dict[str, Attribute]
    error: str | None = None
    message: str = ""
    links: tuple[tuple[str, str], ...] = ()


def session_trace(
    session: SessionView,
    timelines: Sequence[TimelineView],
    *,
    agent: str,
    model: str,
    labels: Mapping[str, str],
    traceparent: str | None,
) -> list[TraceSpan]:
    """Return the spans of a session that is done, beginning with the root. `timelines` are the timelines of the
    session's attempts, without the arguments of commands. The root has a link to `traceparent`, the W3C trace context
    of the request that submitted the session."""
    return list(_Trace(session, agent, model, labels, traceparent).spans(timelines))


class _Trace:
    def __init__(
        self, session: SessionView, agent: str, model: str, labels: Mapping[str, str], traceparent: str | None
    ) -> None:
        self._session = session
        self._agent = agent
        self._model = model
        self._labels = labels
        self._link = TRACEPARENT.fullmatch(traceparent or "")
        self._id = _hex(session.id, 16)

    def spans(self, timelines: Sequence[TimelineView]) -> Iterator[TraceSpan]:
        session, result = self._session, self._session.result
        times = [session.created, session.updated]
        times += [moment for view in timelines for span in view.spans for moment in (span.start, span.end) if moment]
        times += [moment for view in timelines for one in view.attempts for moment in (one.began, one.ended) if moment]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": self._agent,
            "gen_ai.conversation.id": session.id,
            "gen_ai.request.model": self._model,
            "outrider.group": session.group_id,
            "outrider.sample": session.sample_index,
            "outrider.attempts": session.attempt,
        }
        attributes |= {f"outrider.label.{name}": value for name, value in self._labels.items()}
        error, message = None, ""
        if result is not None:
            attributes["outrider.stop_reason"] = result.stop_reason.value
            attributes["outrider.turns"] = result.turns
            attributes["gen_ai.usage.output_tokens"] = result.tokens.sampled
            if result.verdict is not None:
                attributes["outrider.reward"] = result.verdict.reward
            if result.error is not None:
                error, message = result.error.code, result.error.message
        root = self._span(
            "session", None, f"invoke_agent {self._agent}", min(times), max(times), attributes, error, message
        )
        if self._link is not None:
            root = msgspec.structs.replace(root, links=((self._link[1], self._link[2]),))
        yield root
        for view in timelines:
            yield from self._attempt(view, root)

    def _attempt(self, view: TimelineView, root: TraceSpan) -> Iterator[TraceSpan]:
        own = next((one for one in view.attempts if one.attempt == view.attempt), None)
        if own is None:  # the session ended before its first attempt began
            return
        key = f"attempt {view.attempt}"
        inner = [span for span in view.spans if span.name != "waiting"]
        began = min([own.began, *(span.start for span in inner)])
        ended = max([own.ended or own.began, *(span.end or span.start for span in inner)])
        about: dict[str, Any] = {"outrider.attempt": view.attempt, "outrider.node": own.node or ""}
        attempt = self._span(key, root.span_id, key, began, ended, about, own.error, own.message)
        yield attempt
        stages = []
        for number, span in enumerate(inner):
            if span.kind == "stage":
                stage = self._span(f"{key} stage {number}", attempt.span_id, span.name, span.start, span.end, {})
                stages.append(stage)
                yield stage
        parents = _Parents(attempt, stages)
        subagents: dict[str, TraceSpan] = {}
        for number, span in enumerate(inner):
            name = f"{key} {span.kind} {number}"
            parent = parents.of(span)
            match span.kind:
                case "call":
                    if (label := _subagent(span)) is not None:
                        if label not in subagents:
                            subagents[label] = made = self._subagent(f"{key} subagent {label}", label, inner, parent)
                            yield made
                        parent = subagents[label].span_id
                    yield self._call(name, span, parent)
                case "failed_call":
                    yield self._failed_call(name, span, parent)
                case "command":
                    yield self._command(name, span, parent)
                case "sandbox":
                    about = {
                        "outrider.sandbox": span.data.get("sandbox", ""),
                        "outrider.warm": bool(span.data.get("warm")),
                    }
                    yield self._span(name, parent, f"sandbox {span.name}", span.start, span.end, about)
                case "process":
                    about = {"process.pid": span.data.get("pid", 0), "process.executable.name": span.name}
                    if (code := span.data.get("exit_code")) is not None:
                        about["process.exit.code"] = code
                    yield self._span(name, parent, f"process {span.name}", span.start, span.end, about)
                case "network":
                    yield self._network(name, span, parent)

    def _subagent(self, key: str, label: str, spans: Sequence[SpanView], parent: str) -> TraceSpan:
        calls = [span for span in spans if _subagent(span) == label]
        about = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": label,
            "gen_ai.conversation.id": self._session.id,
        }
        start, end = min(span.start for span in calls), max(span.end or span.start for span in calls)
        return self._span(key, parent, f"invoke_agent {label}", start, end, about)

    def _call(self, key: str, span: SpanView, parent: str) -> TraceSpan:
        data, model = span.data, span.name or self._model
        about: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": self._session.id,
            "gen_ai.usage.input_tokens": data["prompt_tokens"],
            "gen_ai.usage.output_tokens": data["output_tokens"],
            "gen_ai.response.finish_reasons": [data["finish"]],
            "outrider.turn": data["turn"],
            "outrider.branch": data["branch"],
            "outrider.engine": data["engine"],
            "outrider.dialect": data["dialect"],
        }
        if label := data.get("label"):
            about["outrider.branch_label"] = label
        if (cached := data.get("cached_tokens")) is not None:
            about["gen_ai.usage.cache_read.input_tokens"] = cached
        if (first := data.get("first_token")) is not None:
            about["gen_ai.response.time_to_first_chunk"] = first - span.start
        if (version := data.get("version")) is not None:
            about["outrider.policy_version"] = version
        return self._span(key, parent, f"chat {model}", span.start, span.end, about)

    def _failed_call(self, key: str, span: SpanView, parent: str) -> TraceSpan:
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.conversation.id": self._session.id,
            "http.response.status_code": span.data.get("status", 0),
            "outrider.action": span.data.get("action", ""),
            "outrider.dialect": span.data.get("dialect", ""),
        }
        return self._span(key, parent, f"chat {self._model}", span.start, span.end, about, span.name)

    def _command(self, key: str, span: SpanView, parent: str) -> TraceSpan:
        code = span.data.get("exit_code")
        about: dict[str, Any] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": span.name,
            "outrider.sandbox": span.data.get("sandbox", ""),
        }
        if code is not None:
            about["process.exit.code"] = code
        return self._span(key, parent, f"execute_tool {span.name}", span.start, span.end, about)

    def _network(self, key: str, span: SpanView, parent: str) -> TraceSpan:
        about: dict[str, Any] = {"outrider.sandbox": span.data.get("sandbox", "")}
        about |= {f"outrider.{name}": span.data[name] for name in NETWORK_DATA if name in span.data}
        host, _, port = span.name.rpartition(":")
        # A host that has sent nothing may not exist: its name may be any text of the agent.
        if span.data.get("received") and port.isdecimal():
            about |= {"server.address": host.strip("[]"), "server.port": int(port)}
        return self._span(key, parent, "network", span.start, span.end, about)

    def _span(
        self,
        key: str,
        parent: str | None,
        name: str,
        start: float,
        end: float | None,
        attributes: Mapping[str, Any],
        error: str | None = None,
        message: str = "",
    ) -> TraceSpan:
        last = max(start, start if end is None else end)
        return TraceSpan(
            trace_id=self._id,
            span_id=_hex(f"{self._session.id} {key}", 8),
            parent_id=parent,
            name=name,
            start=round(start * 1e9),
            end=round(last * 1e9),
            attributes=dict(attributes),
            error=error,
            message=message,
        )


class _Parents:
    """Finds the parent of a span: the stage in which the span began, or the attempt if the span began outside of all
    stages."""

    def __init__(self, attempt: TraceSpan, stages: Sequence[TraceSpan]) -> None:
        self._attempt = attempt
        self._stages = stages

    def of(self, span: SpanView) -> str:
        start = round(span.start * 1e9)
        found = [stage for stage in self._stages if stage.start <= start < stage.end]
        return max(found, key=lambda stage: stage.start, default=self._attempt).span_id


def _subagent(span: SpanView) -> str | None:
    """Return the name of the sub-agent that made a model call, or None for all other spans."""
    if span.kind != "call" or span.data.get("branch") != "subagent":
        return None
    return str(span.data.get("agent_id") or span.data.get("label") or "subagent")


def _hex(text: str, size: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * size]
