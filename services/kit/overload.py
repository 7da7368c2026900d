"""What a service does when it is asked for more than it can do: it says so at once, and continues with what it has.

Requests that queue for the database hold memory and connections, and are answered only when nobody waits for the answer
any more. Beyond a certain number, further ones are told to come back.
"""

import random
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.contracts.codes import ProblemCode
from services.kit.problems import ProblemError, problem_response

HEALTH = ("/healthz", "/readyz", "/metrics")
LONGEST_WAIT_S = 5


class OverloadMiddleware:
    """Answer 503 with ``Retry-After`` to requests beyond ``max_requests`` whose answers have not begun.

    A stream that has begun no longer counts, so that followers of logs and events keep nobody out. Clients that are
    told to come back are given different times, so that they do not all return at once.
    """

    def __init__(
        self, app: ASGIApp, max_requests: int, wait_s: Callable[[int, int], int] = random.SystemRandom().randint
    ) -> None:
        self._app, self._max_requests, self._wait_s = app, max_requests, wait_s
        self._unanswered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        if self._unanswered >= self._max_requests:
            later = {"Retry-After": str(self._wait_s(1, LONGEST_WAIT_S))}
            detail = "Too many requests at once; nothing was done."
            error = ProblemError(503, ProblemCode.UNAVAILABLE, detail, headers=later)
            await problem_response(error)(scope, receive, send)
            return
        waits = True
        self._unanswered += 1

        def answered() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._unanswered -= 1

        async def counted_send(message: Message) -> None:
            answered()
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        finally:
            answered()
