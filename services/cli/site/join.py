"""`wattshift join` and `leave`: this host as a node of an installation elsewhere."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from services.cli.client import DataDir, data_dir
from services.cli.commands import EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.jobs.names import checked_name
from services.cli.output import console
from services.cli.values import text_of
from services.contracts.nodes import NodeCertificate, NodeRole
from services.kit import files
from services.kit.ids import host_name
from services.kit.settings import SECRET_VARIABLES
from services.kit.tls import Tls
from services.standalone import processes
from services.standalone.process import BadInputError

if TYPE_CHECKING:
    from services.kit.enrolment import Enrolment
    from services.kit.http import ServiceClient

TOKEN = "WATTSHIFT_JOIN_TOKEN"
SETTINGS = "agent.env"
_NAME, _URL, _PIN = "GPU_AGENT_NODE_ID", "WATTSHIFT_TELEMETRY_URL", "GPU_AGENT_TLS_PIN"
_STATE, _CERTIFICATE, _KEY = "GPU_AGENT_STATE_DIR", "WATTSHIFT_TLS_CERT", "WATTSHIFT_TLS_KEY"
_ALL = (_NAME, _URL, _PIN, _STATE, _CERTIFICATE, _KEY)
_WITHIN_S = 10.0
_UNAUTHENTICATED, _FAULT = 401, 500


def register(app: typer.Typer) -> None:
    app.command()(join)
    app.command()(leave)


def join(
    url: Annotated[
        str | None, typer.Argument(help="As `wattshift up --listen` prints it; without it, as joined before.")
    ] = None,
    token: Annotated[
        str | None, typer.Argument(help=f"Printed there too; `-` reads standard input. By default {TOKEN}.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="A file with the token.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the node; by default that of this host.")] = None,
    folder: DataDir = None,
) -> None:
    """Make this host a node of an installation elsewhere, and run its agent until Ctrl-C.

    The agent's settings (GPU_AGENT_...) are kept, so that a plain `wattshift join` starts it again.
    """
    from services.kit.problems import ProblemError

    place = (folder or data_dir()).absolute() / "joined"
    if url is None:
        if token is not None or token_file is not None or name is not None:
            raise CliError("a token and a name go with the URL: wattshift join URL TOKEN", EXIT_USAGE)
        _run(place)
    if (place / SETTINGS).exists():
        known = _read(place)
        raise CliError(
            f"this host is {known[_NAME]} of {known[_URL]} already: a plain `wattshift join` starts its agent, "
            "`wattshift leave` ends that",
            EXIT_USAGE,
        )
    secret, pin = _token(token, token_file)
    _check_gpus()
    address = _check_certificate(url, pin)
    settings = _settings(place, url.rstrip("/"), pin, address, name)
    state = Path(settings[_STATE])
    missing = [path for path in (place.parent, place, state) if not path.exists()]
    try:
        with _alone(state):
            asyncio.run(_enrol(settings, secret))
            lines = (f"{variable}={shlex.quote(value)}\n" for variable, value in settings.items())
            files.replace(place / SETTINGS, "".join(lines).encode(), mode=0o600)
    except ProblemError as error:
        if error.status < _FAULT:
            for path in missing[:1]:
                shutil.rmtree(path)
            raise CliError(error.detail, EXIT_REFUSED) from error
        raise CliError(f"{error.detail} The same command goes on.", EXIT_UNAVAILABLE) from error
    except OSError as error:
        said = f"cannot write below {place}: {error.strerror or error}; once that is mended, the same command goes on"
        raise CliError(said) from error
    console.print(f"joined as {settings[_NAME]}; the agent's settings are in {place / SETTINGS}")
    _run(place)


def leave(folder: DataDir = None) -> None:
    """Make this host a node no longer, once its agent has been stopped; its jobs are queued again."""
    from services.kit.problems import ProblemError

    place = (folder or data_dir()).absolute() / "joined"
    settings = _read(place)
    state = Path(settings[_STATE])
    try:
        with _alone(state):
            asyncio.run(_leave(settings))
            for path in (Path(settings[_CERTIFICATE]), place / SETTINGS):  # the last says that it has joined
                path.unlink(missing_ok=True)
    except ProblemError as error:
        hint = f"`wattshift nodes revoke {settings[_NAME]}` there, and removing {place / SETTINGS} here, do the same"
        raise CliError(f"{error.detail} {hint}", EXIT_UNAVAILABLE) from error
    except OSError as error:
        said = f"cannot remove what {place} has of it: {error.strerror or error}"
        raise CliError(f"{said}; once that is mended, the same command goes on") from error
    console.print(f"{settings[_NAME]} has left {settings[_URL]}; checkpoints and output of its jobs stay in {state}")


def _token(given: str | None, file: Path | None) -> tuple[str, str]:
    if file is not None:
        text = text_of(file)
    else:
        text = sys.stdin.readline() if given == "-" else given or os.environ.get(TOKEN, "")
    secret, _, pin = text.strip().partition(".")
    if not secret:
        raise CliError(
            f"there is no token: give it behind the URL, by {TOKEN}, --token-file FILE, or - for standard input",
            EXIT_USAGE,
        )
    if len(pin) != 64 or set(pin) - set("0123456789abcdef"):
        raise CliError("this is no token of `wattshift up --listen` or `wattshift nodes invite`", EXIT_USAGE)
    return secret, pin


def _check_gpus() -> None:
    if os.environ.get("GPU_AGENT_DRIVER") != "simulated" and (lack := processes.lack_of_gpus()):
        raise CliError(f"this machine has no GPUs: {lack}. GPU_AGENT_DRIVER=simulated simulates some", EXIT_USAGE)


def _check_certificate(url: str, pin: str) -> str:
    """Return this host's address towards the installation, whose certificate must have this fingerprint."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme != "https" or host is None or port is None or parts.path.strip("/"):
        raise CliError(f"{url} is not https://HOST:PORT, as `wattshift up --listen` prints it", EXIT_USAGE)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is known by its fingerprint
    try:
        with (
            socket.create_connection((host, port), timeout=_WITHIN_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as shown,
        ):
            found, address = shown.getpeercert(binary_form=True) or b"", shown.getsockname()[0]
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        why = getattr(error, "strerror", None) or error
        raise CliError(f"{url} does not answer over TLS: {why}", EXIT_UNAVAILABLE) from error
    if sha256(found).hexdigest() != pin:
        raise CliError(
            f"{url} shows another certificate than the token names: somebody else may be answering there. Nothing was "
            "sent to it",
            EXIT_REFUSED,
        )
    return str(address)


def _settings(place: Path, url: str, pin: str, address: str, name: str | None) -> dict[str, str]:
    """Return the agent's settings: those of this shell, and those that follow from the installation it joins."""
    own = {key: value for key, value in os.environ.items() if key.startswith("GPU_AGENT_")}
    own.pop("GPU_AGENT_ENROLL_TOKEN", None)
    found = {
        "GPU_AGENT_ADDRESS": address,
        "GPU_AGENT_HOST": "::" if ":" in address else "0.0.0.0",
        "GPU_AGENT_CHECKPOINTS": "local",
        "GPU_AGENT_NODE_ID": host_name(),
        **own,
        "GPU_AGENT_RELAYED": "true",
        "WATTSHIFT_DATA_DIR": str(place),
        _PIN: pin,
        _URL: url,
    }
    if name is not None:
        found[_NAME] = name
    # Of this node of this installation: what is kept of another one is not to be reported as this one's.
    found[_STATE] = str(place / f"{checked_name(found[_NAME], 'node')}-{pin[:8]}")
    try:
        processes.check_settings([processes.AGENT], {**os.environ, **found})
    except BadInputError as error:
        raise CliError(str(error), EXIT_USAGE) from error
    # Checked without the file, which is not there yet.
    return found | dict.fromkeys((_CERTIFICATE, _KEY), str(place / "certificate.pem"))


def _read(place: Path) -> dict[str, str]:
    path = place / SETTINGS
    try:
        words = [word.partition("=") for word in shlex.split(path.read_text(), comments=True)]
    except FileNotFoundError:
        raise CliError("this host has not joined: wattshift join URL TOKEN", EXIT_USAGE) from None
    except (OSError, ValueError) as error:
        raise CliError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", EXIT_USAGE) from error
    found = {name: value for name, _, value in words}
    if lost := [name for name in _ALL if not found.get(name)]:
        raise CliError(f"{path} does not set {lost[0]}: put it back, or remove {place} and join anew", EXIT_USAGE)
    return found


def _enrolment(settings: dict[str, str], client: ServiceClient, token: str = "") -> Enrolment:
    from services.kit.enrolment import Enrolment, NodeSettings

    node = NodeSettings.model_construct(node_id=settings[_NAME], enroll_token=token, state_dir=Path(settings[_STATE]))
    return Enrolment(node, client, NodeRole.AGENT)


async def _enrol(settings: dict[str, str], token: str) -> None:
    """Become the node, and get the certificate by which the control plane knows its agent; safe to repeat."""
    from services.kit.problems import ProblemError

    async with _telemetry(settings) as client:
        enrolment = _enrolment(settings, client, token)
        secret = await enrolment.secret()
        try:
            found = await _ask(client, settings[_NAME], "certificate", secret)
        except ProblemError as error:
            if error.status != _UNAUTHENTICATED:
                raise
            enrolment.refused()  # it is of an earlier time, which was ended
            found = await _ask(client, settings[_NAME], "certificate", await enrolment.secret())
    pem = NodeCertificate.model_validate_json(found).pem
    files.replace(Path(settings[_CERTIFICATE]), pem.encode(), mode=0o600)


async def _leave(settings: dict[str, str]) -> None:
    """Have the credential revoked, and delete what a start would use."""
    from services.kit.enrolment import FILE
    from services.kit.problems import ProblemError

    async with _telemetry(settings) as client:
        held = _enrolment(settings, client).held
        try:
            if held is not None:
                await _ask(client, settings[_NAME], "leave", held.keys.secret)
        except ProblemError as error:
            if error.status != _UNAUTHENTICATED:  # else it was revoked, or another host has its name
                raise
    (Path(settings[_STATE]) / FILE).unlink(missing_ok=True)


@asynccontextmanager
async def _telemetry(settings: dict[str, str]) -> AsyncIterator[ServiceClient]:
    from services.kit.http import ServiceClient, new_session

    async with new_session(tls=Tls(pin=settings[_PIN])) as session:
        yield ServiceClient(session, settings[_URL], "The installation")


async def _ask(client: ServiceClient, node_id: str, what: str, secret: str) -> bytes:
    return await client.request("POST", f"/v1/nodes/{node_id}/{what}", headers={"authorization": f"Bearer {secret}"})


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Lock the node's state folder, as its agent does; make the folder if it is missing."""
    with ExitStack() as held:
        try:
            for path in (state.parent, state):  # accounts of jobs pass through to their own files
                path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            held.enter_context(files.locked(state / "agent.lock", os.O_RDWR | os.O_CREAT))
        except BlockingIOError:
            raise CliError("the agent of this host runs: stop it first") from None
        except OSError as error:
            raise CliError(f"cannot use {state}: {error.strerror}") from error
        yield


def _run(place: Path) -> NoReturn:
    settings = _read(place)
    with _alone(Path(settings[_STATE])):
        pass
    console.print(f"{settings[_NAME]} runs until Ctrl-C, of {settings[_URL]}")
    console.file.flush()
    os.chdir(place)
    own = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    os.execve(sys.executable, [sys.executable, "-P", "-m", processes.AGENT.module], {**own, **settings})
