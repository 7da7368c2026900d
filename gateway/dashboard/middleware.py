"""Let pages call the API with their session cookie in place of a key."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.dashboard.ended import EndedSessions
from gateway.dashboard.sessions import CSRF_HEADER, Seals, Session, cookie_of
from services.contracts.codes import ProblemCode
from services.kit.access import HEADERS
from services.kit.edge.exchange import Exchange
from services.kit.problems import ProblemError

SCOPE_KEY = "wattshift.session"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
API = ("/v1/", "/emissions/", "/locations", "/metrics")
"""Where the paths of the API begin; pages read the session themselves."""


class SessionMiddleware:
    """Opens the session of a request; a request without a key of its own gets the session's.

    A request that changes something must repeat the session's token in ``X-CSRF-Token``, which only our own pages can
    read. Requests with an ``Authorization`` header are passed on as they are: browsers never add one by themselves.
    """

    def __init__(self, app: ASGIApp, seals: Seals, ended: EndedSessions, valid_s: int) -> None:
        self._app = app
        self._seals = seals
        self._ended = ended
        self._valid_s = valid_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        session = self._seals.open(Session, cookie_of("session", scope, headers.get(b"cookie")), self._valid_s)
        if session is None or await self._ended.has_ended(session):
            await self._app(scope, receive, send)
            return
        scope = {**scope, SCOPE_KEY: session}
        if b"authorization" not in headers and scope["path"].startswith(API):
            if scope["method"] not in SAFE and not session.has_token(headers.get(CSRF_HEADER)):
                detail = "The request does not repeat the token of its page: X-CSRF-Token."
                refusal = ProblemError(403, ProblemCode.FORBIDDEN, detail)
                await Exchange.open(scope, receive, send).refuse(refusal)
                return
            scope["headers"] = [*scope["headers"], (b"authorization", session.authorization)]
            scope[HEADERS] = {**headers, b"authorization": session.authorization}
        await self._app(scope, receive, send)
