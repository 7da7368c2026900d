"""The gateway as seen from the command line."""

import json
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer

from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.output import say
from services.cli.values import not_finite
from services.contracts.codes import ProblemCode
from wattshift import ApiError, Client, StrangerError, UnreachableError
from wattshift.logins import Login, LoginsError, chosen_login
from wattshift.sources import Archive, SourceError

AWAY_S, AWAY_TRIES = 3.0, 100
"""How often, and how many times, whoever waits for something asks a control plane that no longer answers."""

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder for all state; by default WATTSHIFT_DATA_DIR, or .wattshift.")
]


def data_dir() -> Path:
    """Return this machine's installation folder: ``WATTSHIFT_DATA_DIR``, or ``.wattshift`` in the checkout."""
    return Path(os.environ.get("WATTSHIFT_DATA_DIR") or Path(__file__).parents[2] / ".wattshift")


def _login() -> Login | None:
    """Return the login in use; None for this machine's installation."""
    try:
        return chosen_login()
    except LoginsError as error:
        raise CliError(str(error), EXIT_USAGE) from None


def local_url(process: str) -> str | None:
    """Return where a process of this machine's installation listens; None if it has no such process."""
    try:
        return str(_local_status()["urls"][process])
    except (KeyError, TypeError):
        return None


def local_sockets() -> str:
    """Return the folder of the sockets of this machine's installation; empty if it has none."""
    return str(_local_status().get("sockets", ""))


def _local_status() -> dict[str, Any]:
    try:
        found = json.loads((data_dir() / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def gateway_url() -> str:
    """Return ``WATTSHIFT_URL``, or that of the login in use, or where the installation on this machine listens."""
    if url := os.environ.get("WATTSHIFT_URL"):
        return url
    if (login := _login()) is not None:
        return login.url
    try:
        return str(json.loads((data_dir() / "run.json").read_text())["gateway_url"])
    except OSError:
        return "http://127.0.0.1:8000"
    except (ValueError, KeyError, TypeError):
        raise CliError(
            f"{data_dir() / 'run.json'} is corrupt: `wattshift down` and `wattshift up` write a new one", EXIT_USAGE
        ) from None


def is_local(url: str) -> bool:
    """Return whether a URL's host is this machine's loopback address: a control plane there sees the same folders."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def installation_of(url: str) -> Path | None:
    """Return the folder of this machine's installation if ``url`` is where it listens."""
    return data_dir() if local_url("gateway") == url.rstrip("/") else None


def api_key() -> str:
    """Return ``WATTSHIFT_API_KEY``, or that of the login in use, or the admin key of this machine's installation."""
    if key := os.environ.get("WATTSHIFT_API_KEY"):
        return key
    if not os.environ.get("WATTSHIFT_URL") and (login := _login()) is not None:
        return login.key
    try:
        return (data_dir() / "admin.key").read_text().strip()
    except OSError:
        raise CliError(
            "no API key: log in with `wattshift login URL`, set WATTSHIFT_API_KEY, or start the control plane on this "
            "machine with `wattshift up`; a lost admin key of this machine is replaced by `wattshift admin-key --new`",
            EXIT_USAGE,
        ) from None


class Gateway:
    """Calls the public API by the users' client; a failure is a ``CliError`` with a sentence that says what to do.

    Only what has an idempotency key, such as a submission or an order, is retried while the control plane does not
    answer: a person who asks for anything else wants to know at once.
    """

    def __init__(self, url: str | None = None, key: str | None = None, timeout_s: float = 30) -> None:
        self.url = url or gateway_url()
        owners = [] if (folder := installation_of(self.url)) is None else [folder.stat().st_uid]
        try:
            self._client = Client(self.url, key or api_key(), timeout_s=timeout_s, trusted=owners)
        except httpx.InvalidURL as error:
            raise CliError(f"{self.url!r} is not the address of a gateway: {error}", EXIT_USAGE) from None
        except UnicodeEncodeError:
            raise CliError("the API key is none: it has letters beyond ASCII", EXIT_USAGE) from None
        weakref.finalize(self, self._client.close)  # for the commands that leave it to the end of the process

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None, **params: Any) -> Any:
        """Return the JSON of a 2xx answer, or None where it has no body; parameters that are None are left out.

        With an idempotency ``key``, the request is sent again until it is answered.
        """
        answer = self._send(method, path, body, key, params)
        return answer.json() if answer.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.call("GET", path, **params)

    def text(self, path: str, **params: Any) -> httpx.Response:
        """Return the answer to a GET whose body is not JSON."""
        return self._send("GET", path, None, None, params)

    def pages(self, path: str, limit: int = sys.maxsize, **params: Any) -> list[Any]:
        """Return up to ``limit`` items of a paginated list."""
        return [item for page in self.in_pages(path, limit, **params) for item in page]

    def newest(self, path: str, limit: int, **params: Any) -> list[Any]:
        """Return up to ``limit`` items of a list that begins with the newest, and say if there are more."""
        found = self.pages(path, limit + 1, **params)
        if len(found) > limit:
            say(f"wattshift: only the newest {limit} are shown")
        return found[:limit]

    def in_pages(self, path: str, limit: int = sys.maxsize, **params: Any) -> Iterator[list[Any]]:
        """Yield up to ``limit`` items of a paginated list, page by page."""
        cursor: str | None = None
        while limit > 0:
            page = self.get(path, limit=min(500, limit), cursor=cursor, **params)
            yield page["items"]
            limit -= len(page["items"])
            if (cursor := page.get("next_cursor")) is None:
                return

    def send(self, archive: Archive) -> None:
        """Upload the archive of a job's files unless it is already there."""
        with _for_the_user(self.url):
            try:
                self._client.send(archive)
            except SourceError as error:
                raise CliError(str(error), EXIT_REFUSED) from None

    @contextmanager
    def stream(self, path: str, *, method: str = "GET", json: Any = None, **params: Any) -> Iterator[httpx.Response]:
        """Open a response that continues until the server ends it."""
        path = _quoted(path)
        with _for_the_user(self.url), self._client.stream(path, method=method, json=json, params=params) as answer:
            yield answer

    def put(self, path: str, body: Any) -> Any:
        """Return the JSON of a PUT, raising the client's own errors: for requests that nobody waits for."""
        return self._client.request("PUT", path, json=body).json()

    def _send(self, method: str, path: str, body: Any, key: str | None, params: dict[str, Any]) -> httpx.Response:
        content = body.model_dump_json(exclude_unset=True) if hasattr(body, "model_dump_json") else None
        if content is None and (found := not_finite(body)):
            raise CliError(f"{found[0]}: must be a finite number, not {found[1]}", EXIT_USAGE)
        with _for_the_user(self.url):
            return self._client.request(
                method,
                _quoted(path),
                params=params,
                content=content,
                json=body if content is None else None,
                headers=None if key is None else {"idempotency-key": key},
                retries=0 if key is None else None,
            )


def each_time(gateway: Gateway, path: str, every_s: float) -> Iterator[Any]:
    """Yield the JSON of a GET, and again after each pause; once it has answered, the control plane may be away."""
    tries: int | None = None
    while True:
        try:
            found = gateway.get(path)
        except CliError as error:
            if tries is None or tries == AWAY_TRIES or error.exit_code != EXIT_UNAVAILABLE:
                raise
            if not tries:
                say_away(error)
            tries += 1
            time.sleep(AWAY_S)
        else:
            tries = 0
            yield found
            time.sleep(every_s)


def say_away(error: CliError) -> None:
    say(f"wattshift: {error}; asking again for {AWAY_TRIES * AWAY_S / 60:g} minutes")


def _quoted(path: str) -> str:
    """Return a path in which a word that a user typed cannot end it: ``web#old`` is no other name for ``web``."""
    return quote(path, safe="/:@!$&'()*+,;=~")


@contextmanager
def _for_the_user(url: str) -> Iterator[None]:
    try:
        yield
    except UnreachableError as error:
        reason = error.__cause__ if error.__cause__ and str(error.__cause__) else type(error.__cause__).__name__
        message = f"the control plane at {url} does not answer ({reason}); is it running?"
        raise CliError(message, EXIT_UNAVAILABLE) from error
    except StrangerError as error:
        raise CliError(str(error), EXIT_REFUSED) from error
    except ApiError as error:
        exit_code = {404: EXIT_NOT_FOUND, 503: EXIT_UNAVAILABLE}.get(error.status, EXIT_REFUSED)
        known = error.code if error.code in set(ProblemCode) else None
        raise CliError(str(error), exit_code, None if known is None else ProblemCode(known)) from error
