"""``wattshift login``, ``clusters`` and ``logout``, against a gateway."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.client import api_key, gateway_url
from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, CliError
from services.cli.output import console
from tests.cli.conftest import Run

ELSEWHERE = '\n[clusters.far]\nurl = "https://far.example"\nkey = "ws_far"\n'


@pytest.fixture(autouse=True)
def config(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of logins of somebody who has set no variable."""
    for name in ("WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_DATA_DIR", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "wattshift" / "config.toml"


@pytest.fixture
def type_key(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a key on standard input."""
    return lambda key: monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))


def test_a_login_is_checked_kept_and_used(
    run: Run,
    jobs_address: tuple[str, str],
    config: Path,
    type_key: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, key = jobs_address
    type_key(key)

    said = run("login", url + "/", "--cluster", "lab", "--key-stdin")

    assert "logged in to lab" in said
    assert key not in said
    assert config.stat().st_mode & 0o777 == 0o600
    assert (gateway_url(), api_key()) == (url, key)
    assert json.loads(run("jobs", "--json")) == []
    config.write_text(config.read_text() + ELSEWHERE)
    assert [each["name"] for each in json.loads(run("clusters", "--json"))] == ["local", "far", "lab"]
    run("clusters", "use", "far")
    assert (gateway_url(), api_key()) == ("https://far.example", "ws_far")
    monkeypatch.setenv("WATTSHIFT_CLUSTER", "lab")
    assert gateway_url() == url
    monkeypatch.setenv("WATTSHIFT_URL", "http://127.0.0.1:1")
    with pytest.raises(CliError, match=r"no API key|does not answer"):
        run("jobs")
    assert json.loads(run("--cluster", "lab", "jobs", "--json")) == []
    monkeypatch.setenv("WATTSHIFT_CLUSTER", "local")
    assert gateway_url() != url
    run("logout", "lab")
    assert key not in config.read_text()
    assert "ws_far" in config.read_text()


def test_a_key_that_is_refused_is_not_kept(
    run: Run, jobs_address: tuple[str, str], config: Path, type_key: Callable[[str], None]
) -> None:
    type_key("ws_wrong")
    with pytest.raises(CliError, match="does not accept this API key; nothing was stored") as refused:
        run("login", jobs_address[0], "--key-stdin")
    assert refused.value.exit_code == EXIT_REFUSED
    assert not config.exists()


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        (("login", "gpu.example.org", "--key-stdin"), EXIT_USAGE, "is not the address of a gateway"),
        (("login", "http://[::1", "--key-stdin"), EXIT_USAGE, "is not the address of a gateway"),
        (("login", "http://gpu.example.org:x", "--key-stdin"), EXIT_USAGE, "is not the address of a gateway"),
        (("login", "http://127.0.0.1:1", "--cluster", "local", "--key-stdin"), EXIT_USAGE, "local names"),
        (("login", "http://127.0.0.1:1", "--key-stdin"), EXIT_USAGE, "the API key is empty"),
        (("clusters", "use", "moon"), EXIT_NOT_FOUND, "no login for a cluster 'moon'; known: far, local"),
        (("logout", "moon"), EXIT_NOT_FOUND, "no login for a cluster 'moon'"),
        (("logout",), EXIT_NOT_FOUND, "not logged in to any cluster"),
    ],
)
def test_mistakes_are_one_line(
    run: Run, config: Path, type_key: Callable[[str], None], words: tuple[str, ...], exit_code: int, says: str
) -> None:
    config.parent.mkdir()
    config.write_text(ELSEWHERE)
    type_key("")
    with pytest.raises(CliError, match=says) as refused:
        run(*words)
    assert refused.value.exit_code == exit_code
    assert config.read_text() == ELSEWHERE


@pytest.mark.parametrize("text", ["[clusters", "clusters = 3", "[clusters.a]\nurl = 'x'\n"])
def test_a_broken_file_is_one_line(run: Run, config: Path, text: str) -> None:
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(CliError, match="is not a file of logins; repair it"):
        run("jobs")


def test_a_narrow_terminal_gets_fewer_columns_and_whole_reasons(
    run: Run, jobs_address: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSHIFT_URL", jobs_address[0])
    monkeypatch.setenv("WATTSHIFT_API_KEY", jobs_address[1])
    run("submit", "--hold", "--", "true")
    assert "energy" in run("jobs")
    monkeypatch.setattr(console, "_width", 80)
    shown = run("jobs")
    assert "energy" not in shown
    assert "held" in shown
