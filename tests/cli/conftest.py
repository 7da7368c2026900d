"""Gateway and admission as processes, and the command line that talks to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from services.cli.client import Gateway
from services.cli.main import app
from tests.support.services import services


@pytest.fixture(scope="module")
def jobs_address(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Where a gateway is that accepts jobs, which nothing starts, and an admin's key."""
    with (
        services(tmp_path_factory.mktemp("jobs"), database_url, redis_url) as found,
        found.started("services.admission.app"),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found.urls["GATEWAY"], found.admin_key()


@pytest.fixture
def gateway(jobs_address: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """A client of that gateway, which is also where the command line goes."""
    monkeypatch.setenv("WATTSHIFT_URL", jobs_address[0])
    monkeypatch.setenv("WATTSHIFT_API_KEY", jobs_address[1])
    return Gateway(*jobs_address)


Run = Callable[..., str]


@pytest.fixture
def run(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return what it prints on standard output."""

    def run(*words: str, exit_code: int = 0) -> str:
        # Without standalone mode an exit is what the call returns.
        assert (app(list(words), standalone_mode=False) or 0) == exit_code
        return capsys.readouterr().out

    return run
