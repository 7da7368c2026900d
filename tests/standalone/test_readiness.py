"""When a service counts as ready."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.servers import http_ready


@pytest.mark.parametrize(
    ("status", "body", "ready"),
    [
        (200, b'{"status": "ready"}', True),
        (503, b'{"status": "degraded", "detail": "its disk is nearly full"}', True),
        (503, b'{"status": "not ready", "detail": "its database does not answer"}', False),
        (502, b"<html>", False),
        (503, b"[]", False),
    ],
)
def test_one_that_works_in_part_is_ready(status: int, body: bytes, ready: bool) -> None:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert http_ready(("127.0.0.1", server.server_port)) is ready
