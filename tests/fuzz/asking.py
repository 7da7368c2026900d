"""What every fuzz file asks with, and what no answer may be."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import requests
from requests.structures import CaseInsensitiveDict
from schemathesis.config import SchemathesisConfig

from gateway.routes import EVENTS, read_routes
from services.contracts.problems import Problem
from tests.support.servers import ROOT

DESCRIBED: dict[str, Any] = json.loads((ROOT / "deploy" / "openapi.json").read_text())
"""The public API."""
MOST = int(os.environ.get("FUZZ_EXAMPLES", "2"))
"""Examples of each operation."""
WITHIN_S = 30.0
FOLLOWED = {route.path for route in read_routes() if route.media == EVENTS} | {"/v1/jobs/{job_id}/logs"}
"""What goes on until it is told not to."""
CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 20_261_124,
        "generation": {"database": "none", "max-examples": MOST, "with-security-parameters": False},
        "phases": {"coverage": {"enabled": MOST > 2, "unexpected-methods": []}, "stateful": {"enabled": False}},
    }
)
WORDS = ("%00", "..%2F..%2Fetc%2Fpasswd", "x" * 5_000, "-1", str(2**63), "%F0%9F%92%A5", "'%20OR%201=1--", "NaN")
"""In the place of ids, and of values in queries."""
BODIES = (
    *(b"", b"{", b"null", b"[]", b'"x"', b"NaN", b'{"a": 1e999}', b'{"a": ' + b"9" * 5_000 + b"}", b"\xff\xfe"),
    *(b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", b'{"a": ' + b"[" * 1_000 + b"]" * 1_000 + b"}"),
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"\\ud800": "\\udfff"}', b'{"a": 1, "a": 2}', b"x" * 100_000),
)
JSON = {"content-type": "application/json"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def ask(session: requests.Session, sent: dict[str, Any], headers: dict[str, str]) -> requests.Response:
    """Return a whole answer; AssertionError if it does not end in time."""
    given = CaseInsensitiveDict({**(sent.get("headers") or {}), **headers})
    until_s = time.monotonic() + WITHIN_S
    with session.request(**{**sent, "headers": given}, timeout=WITHIN_S, stream=True) as answer:
        content = bytearray()
        for piece in answer.iter_content(65_536):
            content += piece
            assert time.monotonic() < until_s, (sent, headers, content[:500])
        answer._content = bytes(content)
    return answer


def assert_answered(answer: requests.Response, asked: str) -> None:
    """Fail for a server error, and for a refusal that does not say what is wrong.

    Energy of a grid of which nothing is known is not lost: it is to be sent again. A cell that is named may not answer.
    """
    is_later = answer.status_code == 503 and "energy" in asked and "retry-after" in answer.headers
    is_elsewhere = answer.status_code == 503 and "POST /v1/cells" in asked
    assert answer.status_code < 500 or is_later or is_elsewhere, (asked, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", (asked, answer.text)
        assert Problem.model_validate_json(answer.content).detail
