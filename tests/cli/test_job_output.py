"""A job's output in pieces, from its end, by pattern, and where a connection breaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from services.cli.commands import EXIT_REFUSED, EXIT_UNAVAILABLE, CliError
from services.cli.jobs import job_output, jobs
from services.cli.main import app
from services.contracts.nodes import LOG_NEXT_OFFSET_HEADER, LOG_OFFSET_HEADER, LOG_SIZE_HEADER
from wattshift import UnreachableError

PIECE = 10_000
JOB = f"job_{'0' * 26}"


class Printing:
    """A gateway whose job has printed something, and whose connections may break."""

    def __init__(self, printed: bytes, *, kept_from: int = 0, breaks: int = 0, state: str = "succeeded") -> None:
        self.printed, self.kept_from, self.breaks, self.state = printed, kept_from, breaks, state
        self.since_offset = 0
        self.asked_since: list[str] = []
        self.requests: list[tuple[int, int]] = []
        self.fetched = 0

    def __call__(self) -> Printing:
        return self

    def get(self, path: str) -> dict[str, Any]:
        assert path == f"/v1/jobs/{JOB}"
        return {"id": JOB, "name": "a", "state": self.state, "generation": 1, "exit_code": 1, "detail": "cannot run x",
                "footprint": {"energy_j": 0.0, "carbon_gco2": 0.0}}  # fmt: skip

    def _begin(self, offset: int, limit: int) -> int:
        self.requests.append((offset, limit))
        if self.breaks:
            self.breaks -= 1
            raise CliError("gone", EXIT_UNAVAILABLE)
        return max(offset, self.kept_from)

    def text(self, _: str, *, offset: int, limit: int, since: str | None, **__: Any) -> httpx.Response:
        if since is not None:
            self.asked_since.append(since)
            offset = max(offset, self.since_offset)
        begin = self._begin(offset, limit)
        data = self.printed[begin : begin + limit]
        self.fetched += len(data)
        sizes = {
            LOG_OFFSET_HEADER: begin,
            LOG_NEXT_OFFSET_HEADER: begin + len(data),
            LOG_SIZE_HEADER: len(self.printed),
        }
        return httpx.Response(200, content=data, headers={name: str(value) for name, value in sizes.items()})

    def stream(self, _: str, *, offset: int, limit: int, **__: Any) -> Any:
        @contextmanager
        def opened() -> Any:
            begin = self._begin(offset, limit)
            yield httpx.Response(200, headers={LOG_OFFSET_HEADER: str(begin)}, stream=Parts(self, begin))

        return opened()


class Parts(httpx.SyncByteStream):
    """Breaks once, ten bytes on, if the gateway is to."""

    def __init__(self, gateway: Printing, begin: int) -> None:
        self.gateway, self.begin = gateway, begin

    def __iter__(self) -> Any:
        yield self.gateway.printed[self.begin : self.begin + 10]
        if self.gateway.state == "running":
            self.gateway.state = "succeeded"
            raise CliError("gone", EXIT_UNAVAILABLE)
        yield self.gateway.printed[self.begin + 10 :]


@pytest.fixture(autouse=True)
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_output.PIECE_BYTES == 1 << 20
    monkeypatch.setattr(job_output, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(job_output.time, "sleep", lambda _: None)


Shown = Callable[..., list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Shown:
    def shown(gateway: Printing, *words: str) -> list[str]:
        monkeypatch.setattr(jobs, "Gateway", gateway)
        app(["logs", JOB, *words], standalone_mode=False)
        return capfdbinary.readouterr().out.decode().splitlines()

    return shown


LINES = [f"line {number} {'x' * 100}" for number in range(400)]
TEXT = "".join(f"{line}\n" for line in LINES).encode()


def test_all_of_it_comes_in_large_pieces(shown: Shown) -> None:
    gateway = Printing(TEXT)

    assert shown(gateway) == LINES
    assert len(gateway.requests) == len(TEXT) // PIECE + 2  # and one that finds nothing more


@pytest.mark.parametrize("count", [0, 1, 3, 90, 150, 399, 400, 500])
def test_the_last_lines_are_found_from_the_end(shown: Shown, count: int) -> None:
    gateway = Printing(TEXT)

    assert shown(gateway, "--tail", str(count)) == LINES[len(LINES) - min(count, len(LINES)) :]
    if count < 90:
        assert gateway.fetched <= 2 * PIECE + 1, "what is before them is left"


def test_a_last_line_without_an_end_is_one(shown: Shown) -> None:
    assert shown(Printing(b"a\nb\nc"), "--tail", "2") == ["b", "c"]
    assert shown(Printing(b"\n\n\n"), "--tail", "2") == ["", ""]
    assert shown(Printing(b""), "--tail", "2") == []


def test_what_was_written_since_a_time_is_combined_with_the_rest(shown: Shown) -> None:
    gateway = Printing(TEXT)
    gateway.since_offset = TEXT.index(b"line 290 ")

    assert shown(gateway, "--since", "2026-11-01T08:00Z") == LINES[290:]
    assert gateway.fetched < len(TEXT) // 3, "what is before that is left"
    assert shown(gateway, "--since", "2026-11-01T09:00+01:00", "--tail", "3") == LINES[-3:]
    assert shown(gateway, "--since", "2026-11-01T08:00Z", "--tail", "300") == LINES[290:]
    assert shown(gateway, "--since", "2026-11-01T08:00Z", "--grep", "5 ") == LINES[295::10]
    assert {datetime.fromisoformat(each) for each in gateway.asked_since} == {datetime(2026, 11, 1, 8, tzinfo=UTC)}
    gateway.state, gateway.requests = "running", []
    assert shown(gateway, "--since", "10m", "--follow", "--grep", "[02] ") == [
        line for line in LINES[290:] if "0 " in line or "2 " in line
    ]
    assert [offset for offset, _ in gateway.requests[-2:]] == [gateway.since_offset, gateway.since_offset + 10]
    with pytest.raises(CliError, match="--since: 'soon' is neither an age"):
        shown(gateway, "--since", "soon")


def test_what_was_discarded_is_not_looked_for(shown: Shown) -> None:
    kept_from = TEXT.index(b"line 300 ")

    assert shown(Printing(TEXT, kept_from=kept_from), "--tail", "200") == LINES[300:]


def test_a_pattern_chooses_lines_also_over_the_ends_of_pieces(shown: Shown) -> None:
    assert shown(Printing(TEXT), "--grep", "^line [0-9]*77 ") == LINES[77::100]
    assert shown(Printing(b"loss 1\nother\nloss 2"), "--grep", "loss", "-n", "2") == ["loss 2"]
    assert shown(Printing(b"ab\ncd\n"), "--grep", "c", "--follow") == ["cd"]
    with pytest.raises(CliError, match="--grep: '\\[' is no regular expression"):
        shown(Printing(TEXT), "--grep", "[")


def test_a_connection_that_breaks_is_taken_up_where_it_was(shown: Shown) -> None:
    assert shown(Printing(TEXT, breaks=3)) == LINES
    assert shown(Printing(TEXT, breaks=1), "--tail", "2") == LINES[-2:]
    following = Printing(TEXT, state="running")
    assert shown(following, "--follow") == LINES
    assert [offset for offset, _ in following.requests] == [0, 10]
    with pytest.raises(CliError, match="gone"):
        shown(Printing(TEXT, breaks=100))


class Away(Printing):
    """A gateway that is away for a while once the job is known, and then when its output is followed."""

    asked = 0

    def get(self, path: str) -> dict[str, Any]:
        self.asked += 1
        if self.asked in (2, 3, 4):
            raise CliError("the control plane does not answer", EXIT_UNAVAILABLE)
        return super().get(path)

    def _begin(self, offset: int, limit: int) -> int:
        try:
            return super()._begin(offset, limit)
        except CliError as error:
            raise error from UnreachableError("gone")


def test_following_goes_on_after_the_control_plane_was_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Away(TEXT, state="running", breaks=20)
    monkeypatch.setattr(jobs, "Gateway", gateway)
    app(["logs", JOB, "--follow"], standalone_mode=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == LINES
    assert [line for line in shown.err.splitlines() if "asking again" in line] == [
        "wattshift: gone; asking again for 5 minutes",
        "wattshift: the control plane does not answer; asking again for 5 minutes",
    ]
    assert "a succeeded" in shown.err
    gateway.breaks = 1_000
    with pytest.raises(CliError, match="gone"):
        app(["logs", JOB, "--follow"], standalone_mode=False)


def test_another_refusal_is_not_asked_again(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Printing(TEXT)
    asked: list[int] = []

    def refuse(offset: int, limit: int) -> int:
        asked.append(offset)
        raise CliError("no", EXIT_REFUSED)

    monkeypatch.setattr(gateway, "_begin", refuse)
    with pytest.raises(CliError, match="no"):
        shown(gateway)
    assert asked == [0]


def test_following_begins_with_the_last_lines(shown: Shown) -> None:
    gateway = Printing(TEXT)

    assert shown(gateway, "--follow", "--tail", "3") == LINES[-3:]


def test_a_job_that_printed_nothing_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "Gateway", Printing(b"", state="failed"))

    app(["logs", JOB], standalone_mode=False)

    assert capsys.readouterr().err == ("wattshift: nothing was printed; a failed with exit code 1: cannot run x\n")
    app(["logs", JOB, "--since", "1h"], standalone_mode=False)
    assert "nothing was printed since then; a failed" in capsys.readouterr().err


def test_the_last_errors_are_those_of_a_failed_job_alone() -> None:
    failed = {"id": JOB, "state": "failed", "generation": 1}
    gateway: Any = Printing(TEXT)

    assert job_output.last_lines(gateway, failed) == LINES[-job_output.LAST_LINES :]
    assert gateway.fetched < 2**15
    assert job_output.last_lines(gateway, failed | {"state": "succeeded"}) == []
    assert job_output.last_lines(gateway, failed | {"generation": 0}) == []
    assert job_output.last_lines(Printing(TEXT, breaks=1), failed) == [], "it is shown without"  # type: ignore[arg-type]
