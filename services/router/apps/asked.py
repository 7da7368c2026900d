"""What a request asks of an application, by the Open Inference Protocol v2 or plain HTTP, and the errors of both.

The protocol (https://github.com/kserve/open-inference-protocol) names an application where it names a model:

    GET  /v2, /v2/health/live, /v2/health/ready        the router itself
    GET  /v2/models/APP/ready                          whether an instance is ready
    GET  /v2/models/APP                                its metadata, as an instance states it
    POST /v2/models/APP/infer                          an inference

each also with ``/versions/VERSION`` after the application. Everything under ``/apps/APP/`` is plain HTTP: the rest of
the path and the query reach the instance as they are.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import orjson
from starlette.types import Scope

from services.contracts.codes import MEANINGS, PROBLEMS
from services.contracts.invalid import NAME_PATTERN
from services.contracts.problems import MEDIA_TYPE
from services.kit.edge.exchange import Exchange
from services.kit.problems import ProblemError, title_of
from services.router.apps.queue import NotAssignedError
from services.router.openai import JSON, DoorError, check_method
from services.router.upstream import UpstreamError


async def answer_error(exchange: Exchange, error: DoorError, *, is_open_inference: bool) -> None:
    """Answer with an error: as the Open Inference Protocol says, or as a problem document (RFC 9457)."""
    code = "rate_limited" if error.code == "rate_limit_exceeded" else error.code
    if is_open_inference:
        media, document = "application/json", {"error": str(error), "code": code}
    else:
        media = MEDIA_TYPE
        other = "rate_limited" if error.status == 429 else "upstream_failed"
        document = {
            "type": f"{PROBLEMS}/{code if code in MEANINGS else other}",
            "title": title_of(error.status),
            "status": error.status,
            "detail": str(error),
            "code": code,
            "request_id": exchange.request_id.decode(),
        }
    headers = [(b"content-type", media.encode()), *(each for each in error.headers if each != JSON)]
    await exchange.answer(error.status, headers, orjson.dumps(document))


def of_problem(problem: ProblemError) -> DoorError:
    """Return a refusal by the edge as an application's error."""
    headers = [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    return DoorError(problem.status, str(problem.problem_code), problem.detail, more=headers)


def no_app(name: str) -> DoorError:
    """Return the error of an application that does not exist, or that the caller may not use."""
    return DoorError(404, "not_found", f"There is no application {name[:63]} that this key may use.")


def not_assigned(app: str, error: NotAssignedError, least_accuracy_pct: float) -> DoorError:
    """Return the error of a request that was not given an instance."""
    if error.reason == "queue_full":
        detail = f"Too many requests wait for the application {app}."
        return DoorError(429, "queue_full", detail, retry_after_s=error.retry_after_s)
    least = f" with an accuracy of {least_accuracy_pct:g} %" if least_accuracy_pct else ""
    detail = f"No instance of the application {app}{least} is ready."
    return DoorError(503, "no_instance", detail, retry_after_s=error.retry_after_s)


def of_upstream(error: UpstreamError) -> DoorError:
    """Return the error of a request that no instance answered."""
    if error.reason == "timeout":
        return DoorError(504, "upstream_timeout", f"The instance did not answer in time: {error}")
    if error.reason == "busy":
        return DoorError(503, "upstream_busy", f"All instances are busy: {error}", retry_after_s=2)
    return DoorError(
        502, f"upstream_{error.reason}", f"The instance failed before it answered: {error}", retry_after_s=1
    )


OPEN_INFERENCE, PLAIN = "/v2", "/apps/"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})
_NAME = re.compile(NAME_PATTERN.removesuffix("$").encode() + rb"\Z")
_VERSION = re.compile(rb"[A-Za-z0-9._-]{1,63}\Z")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of an application."""

    app: str  #: Its name
    method: str  #: HTTP method
    target: bytes  #: Path and query as the instance gets them
    is_ready_asked: bool = False  #: Whether the request is only for its readiness, which the router knows
    may_repeat: bool = False  #: Whether sending it twice changes nothing but the energy used


def is_apps(path: str) -> bool:
    """Return whether a path belongs to applications."""
    return path.startswith(PLAIN) or path == OPEN_INFERENCE or path.startswith(OPEN_INFERENCE + "/")


def read(scope: Scope, *, has_idempotency_key: bool) -> Asked:
    """Return what is asked of an application; ``DoorError``: 404 if the path names none, 405 for its method."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    method: str = scope["method"]
    match raw.split(b"/"):
        case [b"", b"apps", given, *rest]:
            name = _name(given)
            if method not in METHODS:
                raise DoorError(405, "method_not_allowed", f"Applications do not answer {method}.")
            may_repeat = method in IDEMPOTENT or has_idempotency_key
            found = Asked(name, method, _with_query(b"/" + b"/".join(rest), scope), may_repeat=may_repeat)
        case [b"", b"v2", b"models", given, b"versions", version, *rest] if _VERSION.match(version):
            found = _open_inference(_name(given), method, raw, rest, scope)
        case [b"", b"v2", b"models", given, *rest]:
            found = _open_inference(_name(given), method, raw, rest, scope)
        case _:
            found = None
    if found is None:
        raise DoorError(404, "unknown_url", f"There is no {scope['path'][:200]}.")
    return found


def _open_inference(app: str, method: str, raw: bytes, rest: list[bytes], scope: Scope) -> Asked | None:
    match rest:
        case []:
            check_method(method, "GET", "HEAD")
            return Asked(app, method, _with_query(raw, scope), may_repeat=True)
        case [b"ready"]:
            check_method(method, "GET", "HEAD")
            return Asked(app, method, raw, is_ready_asked=True)
        case [b"infer"]:
            check_method(method, "POST")
            return Asked(app, method, _with_query(raw, scope), may_repeat=True)
        case _:
            return None


def _name(given: bytes) -> str:
    name = unquote_to_bytes(given)
    if not _NAME.match(name):
        raise no_app(name.decode(errors="replace"))
    return name.decode()


def _with_query(path: bytes, scope: Scope) -> bytes:
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path
