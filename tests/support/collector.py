"""A collector of OpenTelemetry for tests: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span, as a collector has it: ids as hexadecimal digits."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What was sent so far, and where to."""

    url: str
    spans: list[Received] = field(default_factory=list[Received])
    paths: set[str] = field(default_factory=set[str])

    def of(self, trace_id: str) -> list[Received]:
        """Return the spans of a trace."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def take(self, path: str, content: bytes) -> None:
        """Keep the spans of a request."""
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            process = next(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            process,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            {each.key: each.value.string_value for each in span.attributes},
                        )
                    )


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """Run a collector that answers ``status``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            found.take(self.path, content)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
