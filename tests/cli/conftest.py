"""Gateway and admission as processes, and the command line that talks to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

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


class NotingGateway:
    """In the place of ``Gateway``: notes what it is asked, and answers as its subclasses say."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []

    def __call__(self) -> Self:
        """Return this one, where a command makes its gateway."""
        return self

    def call(self, method: str, path: str, *, body: Any = None) -> Any:
        """Note a request and answer it."""
        self.calls.append((method, path, body))
        return self.answer(body)

    def answer(self, body: Any) -> Any:
        """Return the answer to every request with a body."""
        raise NotImplementedError


Run = Callable[..., str]


@pytest.fixture
def run(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return what it prints on standard output."""

    def run(*words: str, exit_code: int = 0) -> str:
        # Without standalone mode an exit is what the call returns.
        assert (app(list(words), standalone_mode=False) or 0) == exit_code
        return capsys.readouterr().out

    return run
