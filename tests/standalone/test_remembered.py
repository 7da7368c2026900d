"""What an installation remembers, and what `up` refuses before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.standalone import remembered
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError, StackError
from services.standalone.remembered import Options
from services.standalone.stack import down, read_status, settle, up
from tests.standalone.test_stack import a_stack, start_elsewhere
from tests.support.servers import scratch_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def shared_servers(monkeypatch: pytest.MonkeyPatch, postgres_url: str, redis_url: str) -> None:
    for name in (
        "GATEWAY_PORT",
        "WATTSHIFT_DATA_DIR",
        "WATTSHIFT_ZONE",
        "GPU_AGENT_ZONE",
        "CARBON_ZONES",
        "CARBON_PROVIDERS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    monkeypatch.setenv("REDIS_URL", redis_url)


def test_providers_are_remembered_for_the_zones_that_are_served(folder: Path) -> None:
    data = DataFolder(folder)
    taken = {"WATTSHIFT_ZONE": "GB", "CARBON_PROVIDERS": "GB=uk, FR=eco2mix"}
    given = settle(data, "", None, taken, checks=False)
    remembered.write(data, given.options)
    assert given.environment["CARBON_PROVIDERS"] == taken["CARBON_PROVIDERS"]
    assert settle(data, None, None, {}, checks=False).environment["CARBON_PROVIDERS"] == "GB=uk"
    france = settle(data, None, None, {"WATTSHIFT_ZONE": "FR"}, checks=False)
    assert france.environment["CARBON_PROVIDERS"].strip() == "FR=eco2mix"
    other = settle(data, None, None, {"CARBON_PROVIDERS": "GB=recorded"}, checks=False)
    assert other.changes == ("CARBON_PROVIDERS was GB=uk, FR=eco2mix, is now GB=recorded",)


async def test_a_plain_start_brings_the_same_cluster_and_another_value_changes_it(folder: Path) -> None:
    data = DataFolder(folder)
    remembered_nodes = "1x4@US-CAL-CISO,1x4@DE"
    async with a_stack(folder, nodes="", env={"WATTSHIFT_ZONE": "GB"}) as stack:
        assert stack.environment["CARBON_ZONES"] == "GB"
    assert remembered.read(data) == Options(nodes="", zone="GB")
    remembered.write(data, Options(nodes=remembered_nodes, port=8123, zone="GB"))

    plain = settle(data, None, None, {})
    assert [node.zone for node in plain.nodes] == ["US-CAL-CISO", "DE"]
    assert plain.environment == {"WATTSHIFT_ZONE": "GB", "GATEWAY_PORT": "8123", "CARBON_ZONES": "GB,US-CAL-CISO,DE"}
    assert plain.changes == ()

    other = settle(data, "1x2@SE", None, {"WATTSHIFT_ZONE": "DE", "GATEWAY_PORT": "9000"})
    assert other.options == Options(nodes="1x2@SE", port=9000, zone="DE")
    assert other.changes == (
        f"--nodes was {remembered_nodes}, is now 1x2@SE",
        "--port was 8123, is now 9000",
        "WATTSHIFT_ZONE was GB, is now DE",
    )
    assert remembered.read(data).nodes == remembered_nodes, "only a start that worked is remembered"
    assert plain.options.shown() == f"--nodes {remembered_nodes} --port 8123 WATTSHIFT_ZONE=GB"


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": 4}', '{"port": "http"}'])
def test_remembered_options_that_cannot_be_read_are_one_line(folder: Path, text: str) -> None:
    data = DataFolder(folder)
    data.make()
    (folder / "options.json").write_text(text)
    with pytest.raises(BadInputError, match=r"options\.json: it is not the JSON .* remove it") as caught:
        settle(data, None, None, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("SCHEDULER_ROUND_INTERVAL_S", "abc", "SCHEDULER_ROUND_INTERVAL_S=abc: must be a valid number (default 1800)"),
        ("GATEWAY_PORT", "99999", "GATEWAY_PORT=99999: must be less than or equal to 65535 (default 8000)"),
        ("GPU_AGENT_SAMPLE_INTERVAL_S", "-1", "GPU_AGENT_SAMPLE_INTERVAL_S=-1: must be greater than"),
        ("DATABASE_URL", "mysql://nowhere", "DATABASE_URL must be the postgresql:// address of a server"),
        ("CARBON_PROVIDERS", "GB=uk", "CARBON_PROVIDERS names GB, which CARBON_ZONES does not"),
        ("WATTSHIFT_ZONE", "FR", "there is no recording of FR, but of DE"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError) as caught:
        up(folder / "new", nodes="1x1")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert not (folder / "new").exists()


WRONG = (
    "null",
    '{"state": "running", "processes": [], "pid": "abc"}',
    '{"state": "running", "processes": [], "pid": 1, "started_at_s": "x"}',
    '{"state": "thinking", "processes": [], "pid": -5}',
)
"""JSON that no supervisor writes."""


def test_a_corrupt_run_json_is_one_line_and_the_installation_can_still_be_stopped(folder: Path) -> None:
    running = start_elsewhere(folder)
    for text in (*WRONG, "{"):
        (folder / "run.json").write_text(text)
        with pytest.raises(BadInputError, match=rf"run\.json is corrupt .*`wattshift down` stops .*{running.pid}"):
            read_status(folder)
        with pytest.raises(StackError, match=f"already running as process {running.pid} "):
            up(folder, nodes="1x1")
    assert down(folder) is True
    assert running.wait() == 0
    (folder / "run.json").write_text("{")
    with pytest.raises(BadInputError, match=r"version; `wattshift up` writes a new one"):
        read_status(folder)
    assert down(folder) is False


def test_without_its_run_json_what_runs_is_still_known_and_stopped(folder: Path) -> None:
    running = start_elsewhere(folder)
    (folder / "run.json").unlink()
    with pytest.raises(BadInputError, match=rf"run\.json is missing, .*`wattshift down` stops .*{running.pid}"):
        read_status(folder)
    with pytest.raises(StackError, match=f"already running as process {running.pid} "):
        up(folder, nodes="1x1")
    assert down(folder) is True
    assert running.wait() == 0


@pytest.mark.parametrize("text", ["not JSON", WRONG[-1]])
async def test_a_corrupt_run_json_does_not_keep_the_installation_from_starting(folder: Path, text: str) -> None:
    data = DataFolder(folder)
    data.make()
    (folder / "run.json").write_text(text)
    async with a_stack(folder):
        assert read_status(folder).state == "running"


async def test_a_lost_password_of_a_database_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL")
    (folder / "postgres" / "data").mkdir(parents=True)
    stack = a_stack(folder)
    with pytest.raises(BadInputError, match=r"secrets/postgres is missing, .*: put the file back from a backup"):
        await stack.start()
    assert stack.status().processes == ()


async def test_an_empty_secret_is_one_line(folder: Path) -> None:
    data = DataFolder(folder)
    data.make()
    (folder / "secrets" / "service-token").touch()
    with pytest.raises(BadInputError, match=r"service-token is empty"):
        await a_stack(folder).start()
