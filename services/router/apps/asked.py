"""What a request asks of an application, read from its path: by the Open Inference Protocol v2 or by plain HTTP.

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

from starlette.types import Scope

from services.contracts.invalid import NAME_PATTERN
from services.router.apps.errors import AppError, no_app

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
    """Return what is asked of an application.

    Raises:
        AppError: 404 if the path names none, 405 for a method that it does not answer.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    method: str = scope["method"]
    match raw.split(b"/"):
        case [b"", b"apps", given, *rest]:
            name = _name(given)
            if method not in METHODS:
                raise AppError(405, "method_not_allowed", f"Applications do not answer {method}.")
            may_repeat = method in IDEMPOTENT or has_idempotency_key
            found = Asked(name, method, _with_query(b"/" + b"/".join(rest), scope), may_repeat=may_repeat)
        case [b"", b"v2", b"models", given, b"versions", version, *rest] if _VERSION.match(version):
            found = _open_inference(_name(given), method, raw, rest, scope)
        case [b"", b"v2", b"models", given, *rest]:
            found = _open_inference(_name(given), method, raw, rest, scope)
        case _:
            found = None
    if found is None:
        raise AppError(404, "unknown_url", f"There is no {scope['path'][:200]}.")
    return found


def _open_inference(app: str, method: str, raw: bytes, rest: list[bytes], scope: Scope) -> Asked | None:
    match rest:
        case []:
            _check(method, "GET", "HEAD")
            return Asked(app, method, _with_query(raw, scope), may_repeat=True)
        case [b"ready"]:
            _check(method, "GET", "HEAD")
            return Asked(app, method, raw, is_ready_asked=True)
        case [b"infer"]:
            _check(method, "POST")
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


def _check(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise AppError(405, "method_not_allowed", f"This path answers {' and '.join(allowed)}.")
