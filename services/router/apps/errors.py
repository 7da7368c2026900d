"""Requests to applications that get an error, in the format of the API by which they came."""

from http import HTTPStatus

import orjson

from services.contracts.codes import MEANINGS, PROBLEMS
from services.contracts.problems import MEDIA_TYPE
from services.kit.edge.exchange import Exchange, Header
from services.kit.problems import ProblemError
from services.router.apps.queue import NotAssignedError
from services.router.openai import JSON, DoorError
from services.router.upstream import UpstreamError


class AppError(Exception):
    """A request to an application that the router refuses, or that no instance answered."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after_s: float | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status  #: HTTP status
        self.code = code  #: Stable code
        self.headers = [*headers]  #: Headers of the answer, such as ``retry-after``
        if retry_after_s is not None:
            self.headers.append((b"retry-after", b"%d" % max(1, round(retry_after_s))))

    async def answer(self, exchange: Exchange, *, is_open_inference: bool) -> None:
        """Send the error: as the Open Inference Protocol says, or as a problem document (RFC 9457)."""
        if is_open_inference:
            media, document = "application/json", {"error": str(self), "code": self.code}
        else:
            media = MEDIA_TYPE
            other = "rate_limited" if self.status == 429 else "upstream_failed"
            document = {
                "type": f"{PROBLEMS}/{self.code if self.code in MEANINGS else other}",
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": str(self),
                "code": self.code,
                "request_id": exchange.request_id.decode(),
            }
        await exchange.answer(self.status, [(b"content-type", media.encode()), *self.headers], orjson.dumps(document))


def of_problem(problem: ProblemError) -> AppError:
    """Return a refusal by the edge as an application's error."""
    headers = tuple((name.lower().encode(), value.encode()) for name, value in problem.headers.items())
    return AppError(problem.status, str(problem.problem_code), problem.detail, headers=headers)


def of_key(error: DoorError) -> AppError:
    """Return a refusal by the limits of a key as an application's error."""
    code = "rate_limited" if error.code == "rate_limit_exceeded" else error.code
    return AppError(error.status, code, str(error), headers=tuple(each for each in error.headers if each != JSON))


def no_app(name: str) -> AppError:
    """Return the error of an application that does not exist, or that the caller may not use."""
    return AppError(404, "not_found", f"There is no application {name[:63]} that this key may use.")


def not_assigned(app: str, error: NotAssignedError) -> AppError:
    """Return the error of a request that was not given an instance."""
    if error.reason == "queue_full":
        detail = f"Too many requests wait for the application {app}."
        return AppError(429, "queue_full", detail, retry_after_s=error.retry_after_s)
    detail = f"No instance of the application {app} is ready."
    return AppError(503, "no_instance", detail, retry_after_s=error.retry_after_s)


def of_upstream(error: UpstreamError) -> AppError:
    """Return the error of a request that no instance answered."""
    if error.reason == "timeout":
        return AppError(504, "upstream_timeout", f"The instance did not answer in time: {error}")
    if error.reason == "busy":
        return AppError(503, "upstream_busy", f"All instances are busy: {error}", retry_after_s=2)
    return AppError(
        502, f"upstream_{error.reason}", f"The instance failed before it answered: {error}", retry_after_s=1
    )
