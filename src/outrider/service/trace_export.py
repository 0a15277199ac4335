"""Sends a trace of each session that has ended to an OpenTelemetry collector, by OTLP over HTTP.

Traces are built from the store after a session has ended, so they delay no rollout. The position in the stream of
events is stored, so that a restarted service continues there.

Invariants: a trace is sent until the collector has accepted it or has permanently refused it; a collector that cannot
be reached delays nothing else. A trace that cannot be built, for example because of impossible times, is left out,
and delays no other trace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from outrider.concurrency.chores import Chores, Failures
from outrider.environment import install_command
from outrider.errors import InvalidField, NotFound, OutriderError, ServiceError, may_come_from_machine
from outrider.schemas import EventView
from outrider.service.trace_spans import SCHEMA, TraceSpan, session_trace
from outrider.service.views import ViewReader
from outrider.store.rows import EventKind
from outrider.store.store import Store

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

log = logging.getLogger("outrider.traces")

NAME = "traces"
"""Name of this background work, and of its stored position in the stream of events."""
SETTLED_SECONDS = 3.0
"""How long a trace is held back after the end of its session. Nodes store the last timeline entries in this time."""
LOOK_SECONDS = 1.0
EVENTS_AT_ONCE = 200
SPANS_AT_ONCE = 512
"""A message is sent once it has this many spans, because most of a message's cost does not depend on its size."""
SEND_SECONDS = 10.0


class TraceExport:
    """Sends traces to `endpoint`, the collector's URL for traces (such as `http://collector:4318/v1/traces`). Start
    `run` in a task group. `model` is the name of the policy's model."""

    def __init__(self, store: Store, reader: ViewReader, endpoint: str, *, model: str, failures: Failures) -> None:
        """Raises InvalidField if OpenTelemetry's OTLP exporter is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise InvalidField(
                "traces need the exporter of OpenTelemetry", field="traces_to", hint=install_command("opentelemetry")
            ) from error
        self._store = store
        self._reader = reader
        self._model = model
        self._failures = failures
        self._exporter: OTLPSpanExporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS)
        self._cursor: int | None = None

    async def run(self) -> None:
        """Send traces until cancelled."""
        try:
            async with Chores(self._failures) as chores:
                await chores.begin(NAME, self.send, every=LOOK_SECONDS)
        finally:
            await asyncio.to_thread(self._exporter.shutdown)

    async def send(self) -> None:
        """Send the traces of the sessions that have ended since the last call. Sessions that ended within the last
        SETTLED_SECONDS are left for the next call. The first call with a new store sends nothing."""
        if self._cursor is None:
            kept = await self._store.position(NAME)
            self._cursor = await self._store.last_event() if kept is None else kept
            if kept is None:
                await self._store.keep_position(NAME, self._cursor)
        while events := await self._store.events(after=self._cursor, limit=EVENTS_AT_ONCE):
            # Stop at the first event that is not settled, because the stored position must not pass it.
            settled = list(takewhile(_is_settled, events))
            await self._send_of(settled)
            if len(settled) < len(events):
                return

    async def _send_of(self, events: Sequence[EventView]) -> None:
        """Send the traces of the sessions whose end these events report. The position is stored after each message."""
        traces: list[list[TraceSpan]] = []
        for event in events:
            if event.kind == EventKind.SESSION_DONE:
                traces += await self._traces(event)
            if event is events[-1] or sum(map(len, traces)) >= SPANS_AT_ONCE:
                if traces:
                    await asyncio.to_thread(self._export, traces)
                traces = []
                self._cursor = event.cursor
                await self._store.keep_position(NAME, self._cursor)

    async def _traces(self, event: EventView) -> list[list[TraceSpan]]:
        """Return a list with one trace: that of the session whose end the event reports. The list is empty if the
        session's group was removed in the meantime, or if no trace can be built of what its nodes have reported."""
        assert event.session_id is not None
        try:
            return [await self._spans(event.group_id, event.session_id)]
        except NotFound:
            return []
        except Exception as error:
            if isinstance(error, OutriderError) or may_come_from_machine(error):
                raise
            log.warning("session %s has no trace", event.session_id, exc_info=error)
            return []

    async def _spans(self, group_id: str, session_id: str) -> list[TraceSpan]:
        session, group = await self._reader.session(session_id), await self._store.group(group_id)
        timelines = [
            await self._reader.timeline(session_id, attempt, whole_commands=False)
            for attempt in range(1, session.attempt + 1)
        ]
        make = partial(
            session_trace,
            session,
            timelines,
            agent=group.harness,
            model=self._model,
            labels=group.labels,
            traceparent=group.traceparent,
        )
        return await self._reader.offload(make)

    def _export(self, traces: Sequence[Sequence[TraceSpan]]) -> None:
        """Send traces. Raises ServiceError if the collector does not accept any spans at present."""
        if self._accepts([span for trace in traces for span in trace]):
            return
        # If the collector accepts an empty message, the collector works, and would refuse the message with these traces
        # at every attempt. So each trace is sent alone, and a trace that is refused even then is dropped.
        if not self._accepts([]):
            raise ServiceError(
                "the collector of traces does not accept them",
                hint="is the setting traces_to the address of OTLP over HTTP, such as http://collector:4318/v1/traces?",
            )
        if len(traces) == 1:
            log.warning("the collector refuses trace %s, which is left out", traces[0][0].trace_id)
            return
        for trace in traces:
            self._export([trace])

    def _accepts(self, spans: Sequence[TraceSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export(sdk_spans(spans)) is SpanExportResult.SUCCESS


def _is_settled(event: EventView) -> bool:
    """Return True unless the event was stored within the last SETTLED_SECONDS. An event from the future is settled: the
    clock was ahead when the event was stored, and the wait for its time might take hours."""
    return abs(time.time() - event.at) >= SETTLED_SECONDS


def sdk_spans(spans: Sequence[TraceSpan]) -> list[Any]:
    """Convert spans to the span class of OpenTelemetry's SDK."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource, scope = _origin()

    def context(trace_id: str, span_id: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

    made = []
    for span in spans:
        client = span.attributes.get("gen_ai.operation.name") == "chat"
        failed = span.error is not None
        errors = {"error.type": span.error} if span.error is not None else {}
        made.append(
            ReadableSpan(
                name=span.name,
                context=context(span.trace_id, span.span_id),
                parent=None if span.parent_id is None else context(span.trace_id, span.parent_id),
                resource=resource,
                attributes={**span.attributes, **errors},
                links=[Link(context(*link)) for link in span.links],
                kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.message) if failed else Status(),
                start_time=span.start,
                end_time=span.end,
                instrumentation_scope=scope,
            )
        )
    return made


@cache
def _origin() -> tuple[Resource, InstrumentationScope]:
    """Return the OpenTelemetry resource and scope that name Outrider as the origin of spans."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    resource = Resource.create({"service.name": "outrider"}, schema_url=SCHEMA)
    return resource, InstrumentationScope("outrider", schema_url=SCHEMA)
