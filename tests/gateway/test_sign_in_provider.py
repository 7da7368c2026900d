"""Signing in through a real provider of OpenID Connect, and what of its answers is not believed."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import httpx
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import SecretStr, ValidationError

from gateway.dashboard.oidc import Attempt, Provider
from gateway.settings import GatewaySettings, read_keys
from services.contracts.identity import Role
from services.kit.problems import ProblemError
from tests.gateway.peer import a_peer
from tests.gateway.public import KEYS, a_gateway
from tests.support.ports import Ports
from tests.support.servers import wait_until
from tests.support.services import TOKEN

COOKIE = "wattshift-session"


async def _echo(request: web.Request) -> web.StreamResponse:
    return web.json_response({"path": request.path})


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """The address of a provider that knows Ada, of two groups, and Bob, of none that counts."""
    ports = Ports()
    port = ports.take(28_400)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or _answers(f"{url}/.well-known/openid-configuration"))
        httpx.put(f"{url}/users/ada", json={"preferred_username": "ada", "groups": ["staff", "research"]})
        httpx.put(f"{url}/users/bob", json={"email": "bob@example.org", "groups": ["guests"]})
        yield url
    finally:
        process.kill()
        process.wait()
        ports.release()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def client(provider: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A browser, as it were, before a gateway that knows the provider."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"admins": KEYS[Role.ADMIN], "research": KEYS[Role.OPERATOR]}))
    settings: dict[str, Any] = {
        "oidc_issuer": provider,
        "oidc_name": "the lab",
        "oidc_client_id": "wattshift",
        "oidc_client_secret": "a secret",
        "oidc_keys": keys,
    }
    async with a_gateway(_echo, **settings) as found:
        yield found


async def _come_back(client: httpx.AsyncClient, who: str) -> str:
    """Go to the provider, sign in there, and return the address that it sends the browser to."""
    begun = await client.get("/sign-in/provider", params={"then": "/jobs"})
    assert begun.status_code == 303, begun.text
    async with httpx.AsyncClient() as browser:
        answered = await browser.post(begun.headers["location"], data={"sub": who})
    assert answered.status_code in (302, 303), answered.text
    return str(answered.headers["location"])


async def test_somebody_signs_in_with_the_rights_of_the_key_that_is_meant_for_them(client: httpx.AsyncClient) -> None:
    assert "Sign in with the lab" in (await client.get("/")).text
    answer = await client.get(await _come_back(client, "ada"))

    assert answer.status_code == 200
    assert 'content="0;url=/jobs"' in answer.text
    page = await client.get("/nodes")  # for operators: that of the group research
    assert page.status_code == 200
    assert "ada" in page.text
    assert (await client.get("/v1/reports/footprint")).json() == {"path": "/v1/reports/footprint"}


async def test_somebody_no_key_is_meant_for_stays_out(client: httpx.AsyncClient) -> None:
    answer = await client.get(await _come_back(client, "bob"))

    assert answer.status_code == 403
    assert "no API key is meant for it" in answer.text
    assert COOKIE not in client.cookies


async def test_an_answer_counts_for_the_browser_that_asked_and_once(client: httpx.AsyncClient) -> None:
    address = await _come_back(client, "ada")
    state = parse_qs(urlsplit(address).query)["state"][0]
    other = await client.get(address.replace(state, "another"))
    assert (other.status_code, COOKIE in client.cookies) == (400, False)

    assert (await client.get(address)).status_code == 200
    client.cookies.delete(COOKIE)
    again = await client.get(address)
    assert (again.status_code, COOKIE in client.cookies) == (400, False), "the attempt is over"


async def test_a_provider_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    settings = {"oidc_issuer": "http://127.0.0.1:1", "oidc_client_id": "w", "oidc_keys": keys}
    async with a_gateway(_echo, **settings) as client:
        answer = await client.get("/sign-in/provider")

        assert answer.status_code == 503
        assert "The sign-in provider does not answer" in answer.text


SIGNING = rsa.generate_private_key(65537, 2048)
FORGED = rsa.generate_private_key(65537, 2048)
CLAIMS: dict[str, Any] = {"sub": "ada", "aud": "wattshift", "groups": "research"}


@pytest.mark.parametrize(
    ("changes", "key", "believed"),
    [
        ({}, SIGNING, True),
        ({"aud": "another client"}, SIGNING, False),
        ({"iss": "https://another.example"}, SIGNING, False),
        ({"nonce": "of another attempt"}, SIGNING, False),
        ({"exp": 1_000_000_000}, SIGNING, False),
        ({}, FORGED, False),
    ],
)
async def test_only_a_token_for_us_and_now_from_the_provider_is_believed(
    changes: dict[str, Any], key: rsa.RSAPrivateKey, believed: bool
) -> None:
    attempt = Attempt.begun("/")

    async def answer(request: web.Request) -> web.StreamResponse:
        issuer = f"http://{request.host}"
        if request.path == "/keys":
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(SIGNING.public_key()))
            return web.json_response({"keys": [{**public, "kid": "1", "use": "sig", "alg": "RS256"}]})
        if request.path == "/token":
            times = {"iat": int(time.time()), "exp": int(time.time()) + 300}
            claims = {"iss": issuer, "nonce": attempt.nonce, **times, **CLAIMS, **changes}
            return web.json_response({"id_token": jwt.encode(claims, key, "RS256", {"kid": "1"})})
        places = {"authorization_endpoint": "/in", "token_endpoint": "/token", "jwks_uri": "/keys"}
        return web.json_response({"issuer": issuer, **{name: issuer + path for name, path in places.items()}})

    async with a_peer(answer) as url:
        assert await _believes(url, attempt) is believed


async def _believes(issuer: str, attempt: Attempt) -> bool:
    """Return whether the provider's answer proves who came back; it is refused as unproven, and in no other way."""
    known = {"oidc_client_id": "wattshift", "oidc_client_secret": SecretStr("s")}
    found = Provider(GatewaySettings.model_construct(oidc_issuer=issuer, **known), {"research": "ws_key"})
    async with aiohttp.ClientSession() as found.session:
        try:
            return await found.key(attempt, "a code", "http://here/sign-in/answer") == ("ws_key", "ada")
        except ProblemError as error:
            return error.status != 401


def test_a_file_of_keys_is_checked_at_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "keys.json"
    bad.write_text('{"research": "ws_1"}')
    assert read_keys(bad) == {"research": "ws_1"}
    bad.write_text("[]")
    with pytest.raises(ValidationError, match="must be JSON such as"):
        GatewaySettings(service_token=TOKEN, oidc_keys=bad)
    with pytest.raises(ValidationError, match="GATEWAY_OIDC_ISSUER needs"):
        GatewaySettings(service_token=TOKEN, oidc_issuer="https://x.example")
