"""What both clients have in common: how requests are made, when they are retried, and what their answers mean."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import random
import shlex
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx

from wattshift._json import read, written
from wattshift._later import Later
from wattshift.errors import ApiError, FieldError, UnreachableError, WattshiftError
from wattshift.logins import chosen_login

if TYPE_CHECKING:
    from wattshift import models

    AnyJob = str | models.Job | models.SubmittedJob
    """A job, or its id."""

    AnyArray = str | models.JobArray | models.SubmittedJob
    """An array of jobs, or its id."""

    Ending = TypeVar("Ending", models.Job, models.JobArray, models.Simulation)
    """What can be waited for."""

    Gpus = int | tuple[int, int] | models.GpuRequestFields
    """The size of a gang, its smallest and largest size, or all that can be said of its GPUs."""
else:
    models = Later("wattshift.models")  # its classes take longer to make than most commands to run
    AnyJob = AnyArray = Ending = Gpus = Any

DEFAULT_URL = "http://127.0.0.1:8000"
FINAL = frozenset({"succeeded", "failed", "cancelled"})
"""The states of a job, an array or a simulation that has ended."""

REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
LONGEST_STATED_S = 120.0  #: Of the pauses that an answer asks for: after a longer one, nothing is sent again
FIRST_POLL_S, LONGEST_POLL_S = 0.1, 2.0
PAGE = 500
LOG_NEXT_OFFSET = "x-wattshift-log-next-offset"
LOG_GENERATION = "x-wattshift-log-generation"


@dataclass(frozen=True)
class Account:
    """Where the control plane is, and who asks."""

    url: str
    key: str

    @property
    def verified_by(self) -> bool | ssl.SSLContext:
        """What certificates are verified by, as httpx takes it: by nothing, and so none, where the address has none.

        The authorities that this machine trusts take most of the time in which a client is made.
        """
        return not self.url.lower().startswith("http://") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @classmethod
    def of(cls, url: str | None, key: str | None) -> Account:
        """Return the account that was given, or that of ``WATTSHIFT_URL`` and ``WATTSHIFT_API_KEY``, or of a login.

        A login's key is for its own address: where another address is given, so must be the key.

        Raises:
            WattshiftError: There is no key, or the logins file cannot be used.
        """
        address = url or os.environ.get("WATTSHIFT_URL")
        if found := key or os.environ.get("WATTSHIFT_API_KEY"):
            return cls(address or DEFAULT_URL, found)
        if address or (login := chosen_login()) is None:
            raise WattshiftError(
                "no API key: pass key=..., set WATTSHIFT_API_KEY, or log in with `wattshift login URL`"
            )
        return cls(login.url, login.key)


@dataclass(frozen=True)
class Request:
    """One request, before it is sent."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    json: Any = None
    content: str | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what httpx takes; parameters that are None are left out."""
        headers = dict(self.headers)
        if self.content is not None:
            headers.setdefault("content-type", "application/json")
        return {
            "method": self.method,
            "url": self.path,
            "params": {name: written(value) for name, value in self.params.items() if value is not None},
            "json": None if self.json is None else written(self.json),
            "content": self.content,
            "headers": headers,
        }

    @property
    def is_repeatable(self) -> bool:
        """Whether sending it twice does no more than sending it once."""
        return self.method in REPEATABLE or "idempotency-key" in {name.lower() for name in self.headers}


def pause_after(request: Request, attempt: int, cause: httpx.Response | httpx.HTTPError) -> float | None:
    """Return how many seconds to wait before a request is sent again; None if it may not be.

    A request that was certainly not processed is always sent again, any other only if it is repeatable.
    """
    if isinstance(cause, httpx.Response):
        if cause.status_code not in (429, 503) or (cause.status_code == 503 and not request.is_repeatable):
            return None
    elif not request.is_repeatable and not isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout)):
        return None
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1)
    if isinstance(cause, httpx.Response):
        stated = cause.headers.get("retry-after", "")
        stated_s = float(stated) if stated.isdecimal() else 0.0
        if stated_s > LONGEST_STATED_S:  # of a proxy for hours: whoever asked wants to know that
            return None
        pause_s = max(pause_s, stated_s)
    return pause_s


def refusal(answer: httpx.Response) -> ApiError:
    """Return the error for an answer with a status of 400 or more."""
    request = f"{answer.request.method} {answer.request.url.path}"
    try:
        problem = answer.json()
        errors = tuple(FieldError(str(each["pointer"]), str(each["detail"])) for each in problem.get("errors", ()))
        return ApiError(
            answer.status_code, str(problem["code"]), str(problem["detail"]), errors, problem.get("request_id")
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(answer.status_code, "", f"{request}: HTTP {answer.status_code}")


def unreachable(url: str, error: Exception) -> UnreachableError:
    """Return the error for an answer that did not arrive, or not completely."""
    return UnreachableError(f"the control plane at {url} does not answer ({str(error) or type(error).__name__})")


def id_of(job: AnyJob | AnyArray) -> str:
    """Return the id of a job or an array."""
    return job if isinstance(job, str) else job.id


def spec_of(command: Sequence[str] | None, name: str | None, gpus: Gpus, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a submission.

    Raises:
        TypeError: ``command`` is a single string.
    """
    if isinstance(command, str):
        raise TypeError(f"command is a list of program and arguments, such as {shlex.split(command)!r}, not one text")
    if isinstance(gpus, int):
        sizes: Any = {"min": gpus, "max": gpus}
    elif isinstance(gpus, tuple):
        sizes = {"min": gpus[0], "max": gpus[1]}
    else:
        sizes = gpus
    terms = dict(terms)
    if after := terms.get("after"):
        terms["after"] = {name: _named(jobs) for name, jobs in written(after).items()}
    words = [] if command is None else [str(word) for word in command]
    program = os.path.basename(words[0]) if words else "job"
    return {**terms, "name": name or program, "command": words, "gpus": sizes}


def _named(jobs: Any) -> Any:
    """Return the jobs that a dependency names, with each job object replaced by its id."""
    if isinstance(jobs, list):
        return [_named(job) for job in cast("list[Any]", jobs)]
    return cast("dict[str, Any]", jobs)["id"] if isinstance(jobs, dict) else jobs


class EventReader:
    """Makes events from the lines of an event stream."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.has_ended = False
        """Whether the last event says that its job has ended."""

        self._data: list[str] = []

    def read(self, line: str) -> models.JobEvent | None:
        """Take one line; return the event that it completes, if any."""
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
            return None
        if line or not self._data:
            return None  # an empty line ends an event; id and type are in its data too, and comments keep it alive
        event = read(models.JobEvent, json.loads("\n".join(self._data)))
        self._data.clear()
        self.last_id = event.id
        self.has_ended = event.type.removeprefix("job.") in FINAL
        return event

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers with which to continue after the last event."""
        self._data.clear()
        return {} if self.last_id is None else {"last-event-id": self.last_id}


class LogReader:
    """Decodes the bytes of a job's output, and knows where to continue."""

    def __init__(self, job: AnyJob, stream: str, generation: int | None, node: str | None) -> None:
        self.job = id_of(job)
        self.path = f"/v1/jobs/{self.job}/logs"
        self.offset = 0
        self._stream, self._generation, self._node = stream, generation, node
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def request(self, *, follow: bool) -> Request:
        """Return the request for what comes next."""
        params = {
            "stream": self._stream,
            "generation": self._generation,
            "node": self._node,
            "offset": self.offset,
            "follow": "true" if follow else None,
        }
        return Request("GET", self.path, params)

    def begin(self, answer: httpx.Response) -> None:
        """Note which gang's output this is, as a gang that starts meanwhile has its own."""
        if self._generation is None and (stated := answer.headers.get(LOG_GENERATION)):
            self._generation = int(stated)

    def text(self, data: bytes) -> str:
        """Return the text of the next bytes; a character that is not yet whole comes with the bytes after it."""
        self.offset += len(data)
        return self._decoder.decode(data)

    def rest(self) -> str:
        """Return what is left at the end."""
        return self._decoder.decode(b"", final=True)


def polls() -> Iterator[float]:
    """Yield the seconds to wait before each further poll of a job's state."""
    pause_s = FIRST_POLL_S
    while True:
        yield pause_s
        pause_s = min(LONGEST_POLL_S, pause_s * 1.5)


def merged(pages: Sequence[models.FootprintReport]) -> models.FootprintReport:
    """Return the pages of a report as one, without a cursor."""
    lines = [line for page in pages for line in page.lines]
    return dataclasses.replace(pages[0], lines=lines, next_cursor=None)
