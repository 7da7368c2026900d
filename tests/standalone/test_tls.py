"""A whole installation over TLS with its own authority, where every process shows a certificate."""

from __future__ import annotations

import shutil
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.site import certificates
from services.kit import authority
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError
from services.kit.tls import Tls, check
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.kit.test_heads import a_server as a_head_server
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database, scratch_folder


def made(*arguments: str) -> str:
    """Run ``wattshift ca``."""
    found = CliRunner().invoke(app, ["ca", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def folder() -> Any:
    """A folder with an authority, a host's certificate by it, another authority, and what that issued."""
    with scratch_folder() as found:
        for name in ("ours", "others"):
            made("init", "--folder", str(found / name))
            made("issue", "host", "--folder", str(found / name), "--host", "control.example.org")
        yield found


def tls(folder: Path, name: str = "host", *, authority: str = "ours", of: str = "ours") -> Tls:
    return Tls(folder / of / f"{name}.crt", folder / of / f"{name}.key", folder / authority / "ca.crt")


@asynccontextmanager
async def a_server(shown: Tls, *, asks_clients: bool = False) -> AsyncIterator[int]:
    """Serve over TLS with a certificate; yield the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="fine")

    options = Tls(shown.certificate, shown.key, shown.authority, asks_clients).server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"])
    if "ssl_ca_certs" in options:
        context.load_verify_locations(options["ssl_ca_certs"])
        context.verify_mode = options["ssl_cert_reqs"]
    plain = web.Application()
    plain.router.add_get("/x", answer)
    runner = web.AppRunner(plain)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def reaches(url: str, caller: Tls | None) -> bool:
    """Whether a service with these files gets an answer."""
    async with new_session(tls=caller) as session:
        try:
            return await ServiceClient(session, url, "the peer").request("GET", "/x", attempts=1) == b"fine"
        except ProblemError:
            return False


async def test_what_the_authority_did_not_issue_is_refused(folder: Path) -> None:
    async with a_server(tls(folder)) as port:
        assert await reaches(f"https://127.0.0.1:{port}", tls(folder))
        assert await reaches(f"https://localhost:{port}", Tls(authority=folder / "ours" / "ca.crt"))
        assert not await reaches(f"https://127.0.0.1:{port}", tls(folder, authority="others"))
        assert not await reaches(f"https://127.0.0.1:{port}", None), "the system knows no such authority"
        assert not await reaches(f"http://127.0.0.1:{port}", tls(folder)), "plain HTTP"
    async with a_server(tls(folder, of="others")) as port:
        assert not await reaches(f"https://127.0.0.1:{port}", tls(folder))


async def test_an_expired_certificate_and_one_of_another_host_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(UTC) - timedelta(days=3)

    monkeypatch.setattr(authority, "datetime", Earlier)
    made("issue", "late", "--folder", str(folder / "ours"), "--days", "1")
    monkeypatch.setattr(authority, "datetime", datetime)
    monkeypatch.setattr(certificates, "OWN_NAMES", ())
    made("issue", "elsewhere", "--folder", str(folder / "ours"))

    for name in ("late", "elsewhere"):
        async with a_server(tls(folder, name)) as port:
            assert not await reaches(f"https://127.0.0.1:{port}", tls(folder))


async def test_clients_show_a_certificate_where_that_is_asked_for(folder: Path) -> None:
    async with a_server(tls(folder), asks_clients=True) as port:
        url = f"https://127.0.0.1:{port}"
        assert await reaches(url, tls(folder))
        assert not await reaches(url, Tls(authority=folder / "ours" / "ca.crt"))
        assert not await reaches(url, tls(folder, of="others"))


async def test_files_that_are_replaced_are_used_from_the_next_connection_on(folder: Path) -> None:
    """The server's own and the caller's, whose session stays; a pair that is replaced in part changes nothing."""
    made("issue", "again", "--folder", str(folder / "ours"))
    used = folder / "used"
    used.mkdir()
    for part in ("crt", "key"):
        shutil.copy(folder / "ours" / f"host.{part}", used / f"host.{part}")
        shutil.copy(folder / "others" / f"host.{part}", used / f"caller.{part}")
    shutil.copy(folder / "ours" / "ca.crt", used / "ca.crt")
    shutil.copy(folder / "others" / "ca.crt", used / "believed.crt")
    shown = Tls(used / "host.crt", used / "host.key", used / "ca.crt", asks_clients=True)
    caller = Tls(used / "caller.crt", used / "caller.key", used / "believed.crt")
    async with a_head_server(**shown.server()) as served, new_session(tls=caller) as session:

        def replace(name: str, of: str) -> None:
            shutil.copy(folder / of, used / "new")
            (used / "new").rename(used / name)

        async def seen() -> str:
            context = tls(folder).client()
            assert context is not None
            async with served.client(context) as client:
                pem = ssl.DER_cert_to_PEM_cert(client.writer.get_extra_info("ssl_object").getpeercert(True))
            issued = {(folder / "ours" / f"{name}.crt").read_text(): name for name in ("host", "again")}
            return issued[pem]

        async def is_answered() -> bool:
            url = f"https://localhost:{served.port}"
            try:
                async with session.get(f"{url}/x", allow_redirects=False) as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        assert (await seen(), await is_answered()) == ("host", False)
        replace("host.crt", "ours/again.crt")
        assert await seen() == "host", "its key is still to come"
        replace("host.key", "ours/again.key")
        assert await seen() == "again"
        replace("believed.crt", "ours/ca.crt")
        assert not await is_answered(), "the server does not believe the caller"
        replace("ca.crt", "others/ca.crt")
        assert await is_answered()


def test_an_authority_is_made_once_and_its_keys_are_its_owners(folder: Path) -> None:
    again = CliRunner().invoke(app, ["ca", "init", "--folder", str(folder / "ours")])

    assert again.exit_code != 0
    for key in folder.glob("*/*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for wrong in (["issue", "../x"], ["issue", "ca"], ["issue", "x", "--host", "ü"]):
        assert CliRunner().invoke(app, ["ca", *wrong, "--folder", str(folder / "ours")]).exit_code != 0
    assert CliRunner().invoke(app, ["ca", "issue", "x", "--folder", str(folder / "none")]).exit_code != 0


def test_a_key_that_can_sign_no_certificate_is_one_clear_error(folder: Path) -> None:
    of_dh = x25519.X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    of_rsa = rsa.generate_private_key(65_537, 2_048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    made = folder / "theirs"
    made.mkdir()
    (made / "ca.crt").write_bytes((folder / "ours" / "ca.crt").read_bytes())
    for key, said in ((of_dh, "neither one of an elliptic curve nor RSA"), (of_rsa, "WATTSHIFT_TLS_CERT=")):
        (made / "ca.key").write_bytes(key)
        found = CliRunner().invoke(app, ["ca", "issue", "x", "--folder", str(made)])
        assert said in f"{found.output}{found.exception}"


def test_wrong_files_are_one_clear_error(folder: Path) -> None:
    ours, others = tls(folder), tls(folder, of="others")
    nothing = folder / "nothing"
    wrong = [
        (Tls(ours.certificate), "are set together"),
        (Tls(ours.certificate, others.key), "not the key of the certificate"),
        (Tls(nothing, ours.key), f"WATTSHIFT_TLS_CERT={nothing}: No such file"),
        (Tls(authority=ours.key), "no certificates"),
        (Tls(authority=ours.authority, asks_clients=True), "needs WATTSHIFT_TLS_CERT"),
    ]
    for found, message in wrong:
        with pytest.raises(ValueError, match=message):
            check(found)
    check(ours)


async def test_an_installation_runs_over_tls(
    folder: Path, postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = tls(folder)
    env = {
        "DATABASE_URL": fresh_database(postgres_url),
        "REDIS_URL": redis_url,
        "TELEMETRY_HOST": "127.0.0.1",
        "WATTSHIFT_TLS_CERT": str(host.certificate),
        "WATTSHIFT_TLS_KEY": str(host.key),
        "WATTSHIFT_TLS_CA": str(host.authority),
        "WATTSHIFT_TLS_CLIENTS": "required",
    }
    names = {"gateway", "admission", "carbon", "scheduler", "telemetry", "optimizer", "serving", "simulator"}
    services = [service for service in SERVICES if service.name in names]
    with scratch_folder() as data:
        async with Stack(data, nodes="1x1", env=env, services=services, workers=()) as stack:
            assert stack.gateway_url.startswith("https://")
            key = (data / "admin.key").read_text().strip()
            headers = {"authorization": f"Bearer {key}"}
            trusted = ssl.create_default_context(cafile=str(host.authority))
            async with httpx.AsyncClient(base_url=stack.gateway_url, headers=headers, verify=trusted) as http:

                async def get(path: str) -> Any:
                    return (await http.get(path)).raise_for_status().json()

                async def is_up() -> bool:
                    return any(node["state"] == "up" for node in (await get("/v1/nodes"))["items"])

                async def has_ended() -> bool:
                    return (await get(job))["state"] in ("succeeded", "failed")

                await eventually(is_up)
                (node,) = (await get("/v1/nodes"))["items"]
                made_job = await http.post("/v1/jobs", json={"name": "hello", "command": ["echo", "over TLS"]})
                job = f"/v1/jobs/{made_job.raise_for_status().json()['id']}"
                await eventually(has_ended)
                output = await http.get(f"{job}/logs")
                assert output.text == "over TLS\n", (await get(job), output.text)
                assert (node["credential"], node["agent_url"][:8]) == ("own", "https://")
                refused = await http.get("/v1/nodes", headers={"authorization": "Bearer ws_" + "x" * 43})
                assert refused.status_code == 401
            for url in (stack.urls["telemetry"], node["agent_url"]):
                with pytest.raises(httpx.TransportError):  # no certificate of a client
                    async with httpx.AsyncClient(verify=trusted) as http:
                        await http.get(f"{url}/healthz")
            for url in (stack.gateway_url, stack.urls["telemetry"]):
                with pytest.raises(httpx.TransportError):
                    async with httpx.AsyncClient() as http:
                        await http.get(f"{url}/healthz")
                with pytest.raises(httpx.TransportError):
                    async with httpx.AsyncClient(verify=trusted) as http:
                        await http.get(f"{url.replace('https', 'http')}/healthz")
