"""Where webhooks may go, when they are attempted again, and the receiver in the docs."""

from __future__ import annotations

import base64
import http.server
import os
import re
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_network

import pytest

from services.admission.settings import AdmissionSettings
from services.admission.webhooks.addresses import AddressRules
from services.admission.webhooks.sending import Signer, delay_after_s, retry_after_s, sign
from services.kit.settings import settings_faults
from tests.support.servers import ROOT


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
    ],
)
def test_no_message_goes_into_the_network_by_default(address: str) -> None:
    assert not AddressRules([]).allow(address, encrypted=True)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_need_https(address: str) -> None:
    assert AddressRules([]).allow(address, encrypted=True)
    assert not AddressRules([]).allow(address, encrypted=False)


def test_an_operator_allows_networks() -> None:
    rules = AddressRules([ip_network("10.20.0.0/16"), ip_network("fd00::/8")])
    for address, is_allowed in (("10.20.3.4", True), ("10.21.0.1", False), ("fd00::1", True), ("::1", False)):
        assert [rules.allow(address, encrypted=encrypted) for encrypted in (True, False)] == [is_allowed] * 2


def test_a_wrong_network_is_one_line() -> None:
    given = {
        "WATTSHIFT_SERVICE_TOKEN": "x" * 16,
        "WATTSHIFT_SEALING_KEY": "y" * 64,
        "ADMISSION_WEBHOOK_NETWORKS": "10.0.0.0/8,here",
    }
    (fault,) = settings_faults(AdmissionSettings, given)
    assert "ADMISSION_WEBHOOK_NETWORKS=10.0.0.0/8,here: must be networks such as" in fault


def test_attempts_are_further_and_further_apart() -> None:
    assert [delay_after_s(attempts) for attempts in (1, 2, 3, 4)] == [5, 15, 45, 135]
    assert delay_after_s(1_000_000) == 6 * 3_600


def test_retry_after_is_seconds_or_a_date_and_nonsense_is_nothing() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=100)
    far = "Mon, 01 Jan 99999999999 00:00:00 GMT"
    texts = ("90", "99999999", "", "soon", "-5", "\u0665", far)
    assert [retry_after_s(text) for text in texts] == [90, 86_400, 0, 0, 0, 0, 0]
    assert 60 < retry_after_s(format_datetime(soon, usegmt=True)) <= 100
    assert retry_after_s(format_datetime(soon - timedelta(hours=1), usegmt=True)) == 0


def test_a_signature_is_that_of_the_specification() -> None:
    """The example of the specification's own libraries."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signature = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, '{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_each_webhook_and_each_rotation_has_another_secret() -> None:
    made = {Signer(token).secret(name, n) for token in ("one", "two") for name in ("a", "b") for n in (1, 2)}
    assert len(made) == 8
    assert all(len(base64.b64decode(secret.removeprefix("whsec_"))) == 32 for secret in made)


def test_the_receiver_in_the_docs_accepts_what_is_signed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "webhooks.md").read_text(), re.DOTALL)
    assert code
    names: dict[str, type[http.server.BaseHTTPRequestHandler]] = {}
    exec(code[1], names)
    secret = Signer("x").secret("webhook_1", 1)
    monkeypatch.setitem(os.environ, "WEBHOOK_SECRET", secret)
    server = http.server.HTTPServer(("127.0.0.1", 0), names["Receiver"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    body, now_s = '{"type": "ping"}', int(time.time())

    def status(signature: str) -> int:
        headers = {"webhook-id": "msg_1", "webhook-timestamp": str(now_s), "webhook-signature": signature}
        asked = urllib.request.Request(f"http://127.0.0.1:{server.server_port}", body.encode(), headers)
        try:
            with urllib.request.urlopen(asked) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    try:
        assert status("v1,old " + sign(secret, "msg_1", now_s, body)) == 204
        assert status(sign(Signer("y").secret("webhook_1", 1), "msg_1", now_s, body)) == 401
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert capsys.readouterr().out == "ping msg_1\n"
