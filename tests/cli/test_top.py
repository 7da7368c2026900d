"""``wattshift top`` and ``wattshift carbon`` in a real terminal, before a gateway that answers as ours does."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from rich import console

from services.cli.client import Gateway
from services.cli.site import top
from tests.support.servers import ROOT

NOW = datetime.now(UTC)
REASON = "waiting_for_release"


def a_job(number: int, state: str, reason: str | None) -> dict[str, Any]:
    return {
        **{"id": f"job_{number:03}", "name": f"train-{number:03}", "state": state, "reason": reason, "gpus": 0},
        **{"submitted_at": (NOW - timedelta(minutes=100 - number)).isoformat(), "started_at": None, "progress": None},
        "footprint": {"carbon_gco2": 12.5, "energy_j": 3.6e6},
    }


JOBS = [a_job(0, "running", "running"), *(a_job(number, "queued", REASON) for number in range(1, 60))]
NODE = {"id": "n1", "state": "up", "gpus": 8, "gpus_in_use": 4, "power_w": 1234.0, "zone": "DE"}
HOURS = [NOW + timedelta(hours=hour) for hour in range(-24, 25)]
OUTLOOK = {
    **{"zone": "DE", "now": NOW.isoformat(), "is_stale": False, "time_scale": 1.0},
    "points": [
        {"start_at": start.isoformat(), "end_at": end.isoformat(), "gco2_per_kwh": 300.0 if start <= NOW else 100.0}
        for start, end in pairwise(HOURS)
    ],
}
CURRENT = {
    **{"zone": "DE", "signal": "average_direct", "provider": "recorded", "is_stale": False, "time_scale": 1.0},
    "point": {"gco2_per_kwh": 300.0},
}


SAVED: dict[str, Any] = {
    "day": "2026-11-25",
    "saved_gco2": 120.0,
    "low_gco2": 90.0,
    "high_gco2": 150.0,
    "emitted_gco2": 1_000.0,
    "later_s": 40.0,
    "levers": [{"lever": "power_limit", "saved_gco2": 100.0}, {"lever": "sleep", "saved_gco2": 20.0}],
    "why": "",
    "slack_s": 43_200.0,
    "slack_saved_gco2": 80.0,
    "slack_later_s": 7_200.0,
}


class Answers(BaseHTTPRequestHandler):
    """Answers what the two commands ask; nodes are for operators."""

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        is_user = "user" in self.headers["authorization"]
        answers: dict[str, Any] = {
            "/v1/jobs": {"items": [job for job in JOBS if job["state"] in query.get("state", [])], "next_cursor": None},
            "/v1/policies/active": {"name": "joint"},
            "/v1/nodes": {"items": [NODE]},
            "/v1/reports/savings": {"days": [SAVED], "total": SAVED},
            "/v1/carbon/zones": {"items": [{"zone": "DE"}]},
            "/v1/carbon/DE/outlook": OUTLOOK,
            "/v1/carbon/DE/current": CURRENT,
            "/v1/carbon/DE/forecast": {"method": "ridge", "points": []},
        }
        status, body = (200, answers[path])
        if path == "/v1/nodes" and is_user:
            body = {"type": "x", "title": "x", "status": 403, "detail": "Only an operator may do this.", "errors": []}
            status, body = 403, {**body, "code": "forbidden"}
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/problem+json" if status >= 400 else "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _take_terminal() -> None:
    """Have Ctrl-C reach the command, also where these tests are a shell's background job, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, url: str, *words: str, rows: int = 30, columns: int = 100, key: str = "operator") -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        size = {"COLUMNS": str(columns), "LINES": str(rows), "TERM": "xterm"}
        environment = {**os.environ, "WATTSHIFT_URL": url, "WATTSHIFT_API_KEY": key, **size}
        command = [sys.executable, "-m", "services.cli.main", *words]
        self.process = subprocess.Popen(
            command,
            **{"cwd": ROOT, "env": environment, "stdin": slave, "stdout": slave, "stderr": slave},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self.shown = ""

    def until(self, pattern: str) -> str:
        """Return everything shown so far once ``pattern`` is in what came since the last call."""
        fresh, read, deadline_s = "", b"", time.monotonic() + 60
        while not re.search(pattern, fresh):
            if time.monotonic() > deadline_s:
                self.process.kill()
                raise TimeoutError(f"{pattern} is not in {fresh}")
            if select.select([self.master], [], [], 0.2)[0]:
                read += os.read(self.master, 65_536)  # it may end within a colour, or a letter
                fresh = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read.decode("utf-8", "ignore"))
        self.shown += fresh
        return fresh

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int:
        deadline_s = time.monotonic() + 60
        while (status := self.process.poll()) is None:  # what it writes meanwhile must not hold it up
            assert time.monotonic() < deadline_s
            if select.select([self.master], [], [], 0.1)[0]:
                os.read(self.master, 65_536)
        after = termios.tcgetattr(self.slave)
        os.close(self.slave)
        os.close(self.master)
        assert after == self.before, "the terminal is not as it was"
        return status


def test_top_shows_the_grid_power_and_the_queue_with_whole_reasons(url: str) -> None:
    terminal = Terminal(url, "top", "--every", "0.3")
    shown = terminal.until(r"train-008[^\n]*")
    terminal.press("q")

    assert terminal.end() == 0
    assert re.search(r"DE +300 gCO2/kWh", shown)
    assert re.search(r"n1 +up +██████████░░░░░░░░░░ +4/8 +GPUs +1234 W +DE", shown)
    assert "policy joint  1 running, 59 queued" in shown
    assert "saved 2026-11-25: 120.00 g CO2 (90.00 g to 150.00 g): power limit 100.00 g, sleep 20.00 g" in shown
    assert REASON.replace("_", " ") in shown
    assert "…" not in shown


def test_top_scrolls(url: str) -> None:
    terminal = Terminal(url, "top", "--every", "60")
    first = terminal.until(r"train-008")
    terminal.press("\x1b[6~")
    later = terminal.until(r"train-0[2-9]\d")
    terminal.press("\x03")

    assert terminal.end() == 130
    assert "train-000" in first
    assert "train-000" not in later


def test_top_ends_with_its_terminal(url: str) -> None:
    terminal = Terminal(url, "top", "--every", "60")
    terminal.until(r"train-008")
    os.close(terminal.slave)
    os.close(terminal.master)

    assert terminal.process.wait(60) != 0


def test_top_leaves_out_what_a_user_may_not_see(url: str) -> None:
    terminal = Terminal(url, "top", "--once", key="user", rows=200)
    shown = terminal.until(r"train-059")

    assert terminal.end() == 0
    assert "n1" not in shown
    assert "300 gCO2/kWh" in shown


def test_top_without_a_terminal_says_how_to_get_one_picture(url: str) -> None:
    environment = {**os.environ, "WATTSHIFT_URL": url, "WATTSHIFT_API_KEY": "operator"}
    command = [sys.executable, "-m", "services.cli.main", "top"]

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "wattshift: top needs a terminal; `wattshift top --once` prints one picture\n"


def test_carbon_draws_the_day_before_and_what_is_expected(url: str) -> None:
    terminal = Terminal(url, "carbon", "DE", columns=80)
    shown = terminal.until(r"greenest four hours[^\n]*\n")

    assert terminal.end() == 0
    rows = [line.rstrip("\r") for line in shown.splitlines() if "│" in line]
    assert len(rows) == 8
    assert rows[0].startswith("   300 │█")
    assert rows[0].rstrip().endswith("█")
    assert len(rows[0].rstrip()) < len(rows[-1].rstrip()) == 80
    assert "100 gCO2/kWh" in shown


def test_many_that_wait_do_not_hide_those_that_run() -> None:
    class Busy:
        url = "http://gateway"

        def pages(self, _: str, limit: int, state: list[str]) -> list[Any]:
            waiting = [{**a_job(1, "queued", REASON), "id": f"job_{number}"} for number in range(limit)]
            return waiting if state == ["queued"] else JOBS[:1] if state == ["running"] else []

        def get(self, path: str, **_: Any) -> Any:
            if path == "/v1/reports/savings":
                return {"days": []}
            return {"name": "joint", "items": [NODE] if path == "/v1/nodes" else []}

    picture = top.Picture(cast("Gateway", Busy()))
    picture.look()
    shown = console.Console(width=200, file=io.StringIO())
    shown.print(picture.drawn(rows=20))
    said = cast("io.StringIO", shown.file).getvalue()
    assert "1 running, 500+ queued" in said
    assert "train-000" in said
