"""An OTLP receiver in this process, and checks of the traces that it received."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.waiting import until


class Collector:
    """An OTLP receiver. `requests` are the accepted requests, and `status` is the status of the replies."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.refused = ""
        """Requests with a span of this name get a 400, so that the sender does not retry them."""

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def trace(self, *, spans: int = 1) -> list[Span]:
        """Wait until `spans` spans have been accepted, and return all spans."""
        await until(lambda: len(self.spans) >= spans)
        return self.spans


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            status = collector.status
            names = [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
            if collector.refused in names:
                status = 400
            if status == 200 and names:
                collector.requests.append(request)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}/v1/traces"
        finally:
            server.shutdown()
            thread.join()


def attribute(span: Span, name: str) -> Any:
    for each in span.attributes:
        if each.key == name:
            kind = each.value.WhichOneof("value")
            assert kind is not None
            return getattr(each.value, kind)
    return None


def connected(spans: list[Span]) -> Span:
    """Return the root span of a trace. Checks that the parents of all other spans are in the trace, and that all spans
    lie within the root's time."""
    known = {span.span_id for span in spans}
    assert len(known) == len(spans)
    assert len({span.trace_id for span in spans}) == 1
    (root,) = (span for span in spans if not span.parent_span_id)
    for span in spans:
        assert span is root or span.parent_span_id in known
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    return root
