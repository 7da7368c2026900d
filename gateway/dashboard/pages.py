"""The dashboard's pages, who may see them, and how to sign in and out."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.staticfiles import StaticFiles

from gateway.dashboard.oidc import Attempt, Provider
from gateway.dashboard.sessions import SCOPE_KEY, EndedSessions, Link, Seals, Session, cookie_of, set_cookie
from services.contracts.codes import ProblemCode
from services.contracts.identity import ResolvedKey, Role
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import AddressLimiter
from services.kit.problems import ProblemError
from services.kit.release import RELEASE

HERE = Path(__file__).parent
LARGEST_FORM_BYTES = 8 * 1024
ATTEMPT_S = 600  #: How long a sign-in through a provider may take
LINK_S = 60  #: How long a link that signs somebody in can be used
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "same-origin",  # with none at all, a form's own origin would be hidden from us too
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One page."""

    name: str  #: The name of its template and of its module
    path: str  #: Its path; a segment in braces is a name
    title: str  #: Its title, also in the navigation if it is there
    role: Role = Role.USER  #: The lowest role that may see it
    in_navigation: bool = True  #: Whether it has an entry of its own
    under: str = ""  #: The page whose entry is highlighted while this one is shown

    @property
    def entry(self) -> str:
        """The name of the page whose entry is highlighted."""
        return self.under or self.name


PAGES = (
    Page("now", "/", "Now"),
    Page("jobs", "/jobs", "Jobs"),
    Page("submit", "/jobs/new", "Submit a job", in_navigation=False, under="jobs"),
    Page("job", "/jobs/{name}", "Job", in_navigation=False, under="jobs"),
    Page("nodes", "/nodes", "Nodes", Role.OPERATOR),
    Page("pools", "/pools", "Pools"),
    Page("apps", "/apps", "Apps"),
    Page("policies", "/policies", "Policies"),
    Page("reports", "/reports", "Reports"),
    Page("admin", "/admin", "Admin", Role.OPERATOR),
)


class VersionedFiles(StaticFiles):
    """Files whose URLs change with their content, so that browsers can cache them."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file that may be cached for ever."""
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "public, max-age=31536000, immutable"
        return answer


def version_of(folder: Path) -> str:
    """Return a word that changes whenever the content of a file under ``folder`` does."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Dashboard:
    """The pages. ``keys`` is set once the process has started."""

    keys: KeyCache

    def __init__(
        self,
        seals: Seals,
        ended: EndedSessions,
        *,
        valid_s: int,
        zone: str,
        limiter: AddressLimiter,
        provider: Provider | None,
    ) -> None:
        """Take seals, ended sessions, how long sessions last, the first zone to show, and the sign-in provider."""
        self._seals, self._ended_sessions = seals, ended
        self.provider = provider
        self._valid_s, self._zone, self._limiter = valid_s, zone, limiter
        self._version = version_of(HERE / "static")
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def add_to(self, app: FastAPI) -> None:
        app.mount(f"/static/{self._version}", VersionedFiles(directory=HERE / "static"))
        for page in PAGES:
            app.add_api_route(page.path, self._shown(page), include_in_schema=False, response_class=HTMLResponse)
        app.add_api_route("/sign-in", self._sign_in, methods=["POST"], include_in_schema=False)
        app.add_api_route("/sign-in/link", self._make_link, methods=["POST"], include_in_schema=False)
        app.add_api_route("/sign-in/link", self._follow_link, include_in_schema=False)
        if self.provider is not None:
            app.add_api_route("/sign-in/provider", self._to_provider, include_in_schema=False)
            app.add_api_route("/sign-in/answer", self._from_provider, include_in_schema=False)
        app.add_api_route("/sign-out", self._sign_out, methods=["POST"], include_in_schema=False)

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a page with the security headers of all pages."""
        text = self._templates.get_template(f"{template}.html").render(
            static=f"/static/{self._version}", release=RELEASE, **values
        )
        return HTMLResponse(text, status, headers=HEADERS)

    def begin(self, request: Request, session: Session, answer: Response) -> Response:
        """Set the cookie of a new session."""
        cookie = set_cookie("session", request.scope, self._seals.seal(session), max_age_s=self._valid_s)
        answer.headers.append("set-cookie", cookie)
        return answer

    def _shown(self, page: Page) -> Any:
        async def show(request: Request) -> Response:
            session: Session | None = request.scope.get(SCOPE_KEY)
            if session is None:
                return self._sign_in_page(request, status=200 if page.path == "/" else 401)
            try:
                caller = await self.keys.caller(session.authorization, request.scope)
            except ProblemError as error:
                if error.status != 401:
                    return self.render("unavailable", error.status, detail=error.detail)
                return self._ended(request, self._sign_in_page(request, "Your API key is no longer valid.", 401))
            return self._page(page, session, caller)

        return show

    def _page(self, page: Page, session: Session, caller: ResolvedKey) -> Response:
        identity = caller.identity
        allowed = identity.role.may("GET", page.role)
        return self.render(
            page.name if allowed else "forbidden",
            200 if allowed else 403,
            page=page,
            pages=[each for each in PAGES if each.in_navigation and identity.role.may("GET", each.role)],
            identity=identity,
            name=session.name,
            csrf=session.csrf,
            zone=self._zone,
            may_change=identity.role.may("POST", Role.USER),
        )

    def _sign_in_page(self, request: Request, problem: str = "", status: int = 401) -> HTMLResponse:
        shown = request.method == "GET" and not request.url.path.startswith("/sign-in")
        name = "" if self.provider is None else self.provider.settings.oidc_name
        return self.render("sign_in", status, problem=problem, then=request.url.path if shown else "/", provider=name)

    async def _to_provider(self, request: Request) -> Response:
        assert self.provider is not None
        attempt = Attempt.begun(_local(request.query_params.get("then", "/")))
        try:
            self._limiter.take(request.client.host if request.client else "")
            address = await self.provider.address(attempt, _answer_address(request))
        except ProblemError as error:
            return self._sign_in_page(request, error.detail, error.status)
        answer = RedirectResponse(address, 303, headers=HEADERS)
        # It comes back from another site: a stricter cookie would not be sent then.
        sealed = self._seals.seal(attempt)
        cookie = set_cookie("provider", request.scope, sealed, max_age_s=ATTEMPT_S, same_site="Lax")
        answer.headers.append("set-cookie", cookie)
        return answer

    async def _from_provider(self, request: Request) -> Response:
        assert self.provider is not None
        cookie = cookie_of("provider", request.scope, request.headers.get("cookie", "").encode("latin-1"))
        attempt = self._seals.open(Attempt, cookie, ATTEMPT_S)
        given = request.query_params
        if attempt is None or not hmac.compare_digest(attempt.state.encode(), given.get("state", "").encode()):
            return self._sign_in_page(request, "This sign-in was not begun here, or took too long. Try again.", 400)
        if "code" not in given:
            return self._sign_in_page(request, f"The provider refused: {given.get('error', 'no reason given')}.", 401)
        try:
            key, name = await self.provider.key(attempt, given["code"], _answer_address(request))
            session = Session.begun(key, name)
            await self.keys.caller(session.authorization, request.scope)
        except ProblemError as error:
            return self._sign_in_page(request, error.detail, error.status)
        # A page, and no redirect: the strict cookie is not sent on a way that began at another site.
        answer = self.begin(request, session, self.render("signed_in", then=attempt.then))
        answer.headers.append("set-cookie", set_cookie("provider", request.scope, "", max_age_s=0, same_site="Lax"))
        return answer

    async def _sign_in(self, request: Request) -> Response:
        client = request.client
        try:
            self._limiter.take(client.host if client else "")
            _check_origin(request)
            form = await _read_form(request)
            session = Session.begun(form.get("key", "").strip())
            await self.keys.caller(session.authorization, request.scope)
        except ProblemError as error:
            known = error.status == 401
            return self._sign_in_page(request, "This API key is not valid." if known else error.detail, error.status)
        return self.begin(request, session, RedirectResponse(_local(form.get("then", "/")), 303, headers=HEADERS))

    async def _make_link(self, request: Request) -> Response:
        """Return a link that signs a browser in with the caller's key."""
        authorization = request.headers.get("authorization", "")
        await self.keys.caller(authorization.encode("latin-1"), request.scope)
        key = authorization.partition(" ")[2].strip()
        link = Link(key=key, nonce=secrets.token_urlsafe(24), then=_local(request.query_params.get("then", "/")))
        return JSONResponse({"path": f"/sign-in/link?{urlencode({'link': self._seals.seal(link)})}"}, headers=HEADERS)

    async def _follow_link(self, request: Request) -> Response:
        link = self._seals.open(Link, request.query_params.get("link"), LINK_S)
        try:
            self._limiter.take(request.client.host if request.client else "")
            _check_origin(request)
            if link is None or not await self._ended_sessions.take(link, LINK_S):
                text = "This link was used, or is older than a minute. `wattshift dashboard` makes another."
                return self._sign_in_page(request, text)
            session = Session.begun(link.key)
            await self.keys.caller(session.authorization, request.scope)
        except ProblemError as error:
            return self._sign_in_page(request, error.detail, error.status)
        return self.begin(request, session, RedirectResponse(link.then, 303, headers=HEADERS))

    async def _sign_out(self, request: Request) -> Response:
        session: Session | None = request.scope.get(SCOPE_KEY)
        form = await _read_form(request)
        if session is not None and not session.has_token(form.get("csrf")):
            raise ProblemError(403, ProblemCode.FORBIDDEN, "The form does not repeat the token of its page.")
        if session is not None:
            await self._ended_sessions.end(session)
        return self._ended(request, RedirectResponse("/", 303, headers=HEADERS))

    @staticmethod
    def _ended(request: Request, answer: Response) -> Response:
        answer.headers.append("set-cookie", set_cookie("session", request.scope, "", max_age_s=0))
        return answer


def _check_origin(request: Request) -> None:
    """Raise ProblemError 403 for requests from another site, which would sign its visitors in as somebody else."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_ours = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if site not in (None, "same-origin", "none") or not is_ours:
        raise ProblemError(403, ProblemCode.FORBIDDEN, "The request comes from another site.")


async def _read_form(request: Request) -> dict[str, str]:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_FORM_BYTES:
            raise ProblemError(413, ProblemCode.BODY_TOO_LARGE, "The form is too large.")
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _answer_address(request: Request) -> str:
    """Return the address to which the provider sends people back; it knows our addresses and refuses any other."""
    return f"{request.url.scheme}://{request.headers.get('host', '')}/sign-in/answer"


def _local(path: str) -> str:
    """Return ``path`` if it is on this site, else the first page: no link may lead elsewhere from here."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
