"""Webhooks from the shell, with a gateway, an admission that allows loopback, and a receiver."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from services.cli.commands import CliError
from services.cli.main import app
from tests.cli.conftest import Run
from tests.support.services import services


@pytest.fixture(scope="module")
def jobs_address(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """As everywhere, but webhooks may go to this machine."""
    networks = {"ADMISSION_WEBHOOK_NETWORKS": "127.0.0.0/8", "ADMISSION_WEBHOOK_SETTLE_S": "0"}
    with (
        services(tmp_path_factory.mktemp("webhooks"), database_url, redis_url) as found,
        found.started("services.admission.app", **networks),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found.urls["GATEWAY"], found.admin_key()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Accepts what is posted to /hook, and refuses the rest."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204 if self.path == "/hook" else 403)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_is_made_tested_rotated_and_deleted(run: Run, receiver: str) -> None:
    made, secret = run("webhooks", "create", f"{receiver}/hook", "--events", "node.lost, job.ended").splitlines()
    webhook = made.split()[0]
    assert made == f"{webhook}  job.ended, node.lost to {receiver}/hook"
    assert secret.startswith("the secret, shown this once: whsec_")
    assert "delivered: answered 204" in run("webhooks", "test", webhook)
    assert "enabled" in run("webhooks", "list")
    assert run("webhooks", "rotate", webhook).splitlines()[1] != secret
    assert run("webhooks", "disable", webhook) == f"{webhook} is disabled\n"
    shown = run("webhooks", "show", webhook)
    assert f"disabled: disabled by hand; `wattshift webhooks enable {webhook}`" in shown
    assert "ping" in shown
    run("webhooks", "enable", webhook)
    run("webhooks", "delete", webhook)
    assert run("webhooks", "list") == "no webhooks\n"


def test_a_test_that_is_refused_is_an_exit_status(run: Run, receiver: str) -> None:
    webhook = run("webhooks", "create", receiver).split()[0]
    assert "failed: answered 403" in run("webhooks", "test", webhook, exit_code=1)
    run("webhooks", "delete", webhook)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("create", "http://x/", "--events", "job.began"),
            "--events job.began: must be of job.started, job.ended, budget.exceeded,",
        ),
        (("create", "http://x/", "--events", ","), "--events: name at least one of job.started, job.ended,"),
        (("create", "x"), "url: must be an address such as https://example.org/hook"),
        (("create", "https://10.0.0.1/"), "url: must be a public address; the operator allows other networks by"),
        (("create", "http://127.0.0.1/", "--events", "node.lost", "--project", "p"), "project: must be left out"),
        (("show", "webhook_1"), "There is no such webhook"),
        (("rotate", "webhook_1", "--overlap", "soon"), "--overlap: 'soon' is not a duration"),
    ],
)
def test_a_wrong_option_is_one_line(run: Run, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(CliError) as refused:
        app(["webhooks", *words], standalone_mode=False)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert run("webhooks", "list") == "no webhooks\n"
