"""An S3 server in a process of its own."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.servers import wait_until

BUCKET = "checkpoints"
KEY, SECRET = "AKIDOFTHETESTS", "the-secret-key-of-the-store"


@contextmanager
def s3_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run one with an empty bucket; yield its address and its process."""
    pytest.importorskip("moto", reason="the S3 server of the tests (moto) is not installed")
    pytest.importorskip("obstore", reason="the extra s3 (obstore) is not installed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: server.poll() is not None or _makes_a_bucket(port))
        assert server.poll() is None
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def _makes_a_bucket(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("PUT", f"/{BUCKET}")
        return connection.getresponse().status == 200
    return False
