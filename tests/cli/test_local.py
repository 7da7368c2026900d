"""What `up` and `status` say of the installation of this machine."""

from dataclasses import replace

import pytest

from services.cli import local
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
