"""What `up` and `status` say of the installation of this machine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli.site import local
from services.standalone.data_folder import ProcessStatus, StackStatus

CARBON = ProcessStatus("carbon", "running", 7, None, 0, None, socket="/run/wattshift-12345678/carbon.sock")
GATEWAY = ProcessStatus("gateway", "starting", 8, 8000, 0, None)
STARTING = StackStatus("starting", processes=(CARBON, GATEWAY))


def test_status_shows_where_each_listens_and_whether_jobs_are_trusted() -> None:
    with local.console.capture() as shown:
        local._print_status(STARTING)
        local._print_status(StackStatus("failed", detail="it did not start: no room"))
    printed = shown.get()
    assert (CARBON.socket in printed, "8000" in printed, "trusted" in printed) == (True, True, False)
    assert "it did not start: no room" in printed
    with local.console.capture() as shown:
        local._print_status(replace(STARTING, trusts_jobs=True))
    assert "jobs run as the user of the control plane, and are trusted" in shown.get()


def test_status_counts_what_is_not_booked_as_the_meters_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = StackStatus("running", gateway_url="http://127.0.0.1:1")
    nodes = [{"id": "n0", "marked_intervals": 3}, {"id": "n1", "marked_intervals": 0}, {"id": "n2"}]
    monkeypatch.setattr(local, "Gateway", lambda *_: SimpleNamespace(get=lambda _: {"items": nodes}))
    (tmp_path / "admin.key").write_text("key")
    assert local._marked_intervals(running, tmp_path) == {"n0": 3}
    assert local._marked_intervals(STARTING, tmp_path) is None
    (tmp_path / "admin.key").unlink()
    assert local._marked_intervals(running, tmp_path) is None, "status says what it can without the key"

    monkeypatch.setattr(local.stack, "read_status", lambda _: running)
    monkeypatch.setattr(local, "_marked_intervals", lambda *_: {"n0": 3})
    with local.console.capture() as shown:
        local.status(tmp_path)
    assert "n0: 3 intervals are not booked as its meters have it" in shown.get()


def test_up_says_off_a_terminal_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SAY_EVERY_S", 0)
    with local.waiting_shown() as show:
        for status in (STARTING, STARTING, replace(STARTING, processes=(CARBON,))):
            show(status)
    captured = capsys.readouterr()
    said = [line.partition(" (")[0] for line in captured.err.splitlines() if "waiting" in line]
    assert said == ["starting: waiting for gateway", "starting: waiting for the next processes"]
    assert captured.out == ""
