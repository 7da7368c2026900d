"""What `up` and `status` say of the installation of this machine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from carbon_service.providers.registry import PROVIDERS
from services.cli.commands import CliError
from services.cli.site import local, nearest_zone
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


def proposed(monkeypatch: pytest.MonkeyPatch, time_zone: str, *, yes: bool, **environment: str) -> dict[str, str]:
    monkeypatch.setenv("TZ", time_zone)
    for name in ("CARBON_ENTSOE_TOKEN", "CARBON_EIA_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return local._proposed(yes)


def test_a_zone_and_its_free_source_are_proposed_by_the_time_zone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = proposed(monkeypatch, "Europe/Berlin", yes=True, CARBON_ENTSOE_TOKEN="t")
    assert taken == {"WATTSHIFT_ZONE": "DE", "CARBON_PROVIDERS": "DE=entsoe"}
    assert "what it lacks: the last one to three hours" in capsys.readouterr().err
    assert proposed(monkeypatch, "Europe/London", yes=True)["CARBON_PROVIDERS"] == "GB=uk"


@pytest.mark.parametrize(
    ("time_zone", "yes", "message"),
    [
        ("America/Chicago", True, "eia needs CARBON_EIA_KEY, which https://www.eia.gov"),
        ("Europe/London", False, "nothing was started: confirm it with --yes"),
        ("Asia/Tokyo", True, "no zone with a free source is known of the time zone Asia/Tokyo"),
    ],
)
def test_what_cannot_be_taken_starts_nothing(
    time_zone: str, yes: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.stack, "up", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(CliError, match=message):
        proposed(monkeypatch, time_zone, yes=yes)


def test_the_time_zone_is_that_of_the_machine_unless_the_environment_names_one(tmp_path: Path) -> None:
    there = tmp_path / "zoneinfo" / "Europe" / "Oslo"
    there.parent.mkdir(parents=True)
    there.touch()
    (tmp_path / "localtime").symlink_to(there)
    assert nearest_zone.time_zone_of({}, tmp_path / "localtime") == "Europe/Oslo"
    assert nearest_zone.time_zone_of({"TZ": ":UTC"}, tmp_path / "localtime") == "UTC"
    assert nearest_zone.time_zone_of({}, tmp_path / "none") == ""


def test_every_source_that_is_proposed_has_its_zone() -> None:
    for time_zone, zones in nearest_zone.ZONES.items():
        choice = nearest_zone.choice_of(time_zone)
        assert choice is not None
        given = {choice.variable.rpartition("_")[2].lower(): "x"} if choice.variable else {}
        entry = PROVIDERS[choice.provider]
        context = SimpleNamespace(http=None, now_s=None, pacing=None)
        provider = entry.build(entry.read_settings(**given), context)  # type: ignore[arg-type]
        assert all(provider.feed(zone) is not None for zone in zones.split(","))
