"""Sign-in through an OpenID Connect provider: authorization code with PKCE; the provider's answer selects an API key.

Whoever signs in gets the key that the operator's file assigns to the value of one claim, a group or a person. There is
no second kind of caller: roles, tenants, limits and the audit log are those of the key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import jwt
from pydantic import BaseModel, ConfigDict, HttpUrl, ValidationError

from gateway.settings import GatewaySettings
from services.contracts.codes import ProblemCode
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable

log = Log(__name__)

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
"""Signatures with a public key alone; none by a secret that others share, and never `none`."""
LEEWAY_S = 60
TIMEOUT = aiohttp.ClientTimeout(total=10)
WHO = ("preferred_username", "email", "name", "sub")


class Attempt(BaseModel, frozen=True):
    """A sign-in in progress, sealed in a cookie of the browser that began it."""

    state: str
    nonce: str
    verifier: str
    then: str

    @classmethod
    def begun(cls, then: str) -> Attempt:
        """Return a new attempt, after which the page ``then`` is shown."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return cls(state=state, nonce=nonce, verifier=verifier, then=then)

    @property
    def challenge(self) -> str:
        """The challenge derived from the verifier, which the provider is shown (RFC 7636)."""
        return base64.urlsafe_b64encode(hashlib.sha256(self.verifier.encode()).digest()).decode().rstrip("=")


class Endpoints(BaseModel):
    """A provider's endpoints, from its own discovery document."""

    model_config = ConfigDict(extra="ignore")

    issuer: str
    authorization_endpoint: HttpUrl
    token_endpoint: HttpUrl
    jwks_uri: HttpUrl


class Provider:
    """Sends people to the provider and finds out who comes back. ``session`` is set once the process has started."""

    session: aiohttp.ClientSession

    def __init__(self, settings: GatewaySettings, keys: Mapping[str, str]) -> None:
        """Take API keys by values of the claim; if several match, the first counts."""
        self.settings, self._assigned = settings, keys
        self._endpoints: Endpoints | None = None
        self._keys: jwt.PyJWKSet | None = None

    async def address(self, attempt: Attempt, redirect_uri: str) -> str:
        """Return where to send the browser."""
        endpoints = await self._discover()
        query = {
            "response_type": "code",
            "client_id": self.settings.oidc_client_id,
            "redirect_uri": redirect_uri,
            "scope": "openid profile email",
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": attempt.challenge,
            "code_challenge_method": "S256",
        }
        address = str(endpoints.authorization_endpoint)
        return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"

    async def key(self, attempt: Attempt, code: str, redirect_uri: str) -> tuple[str, str]:
        """Return the API key of whoever comes back with ``code``, and their name.

        Raises:
            ProblemError: 401 if the provider or its answer does not prove who they are, 403 if no key is theirs,
                503 if it does not answer.
        """
        endpoints = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": attempt.verifier,
        }
        # Both parts are encoded as in a form before they are joined (RFC 6749, section 2.3.1).
        parts = (self.settings.oidc_client_id, self.settings.oidc_client_secret.get_secret_value())
        proof = base64.b64encode(":".join(quote(part, safe="") for part in parts).encode()).decode()
        headers = {"authorization": f"Basic {proof}"}
        answer = await self._ask("POST", str(endpoints.token_endpoint), data=form, headers=headers)
        claims = await self._claims(str(answer.get("id_token", "")), attempt.nonce)
        name = next((str(claims[each]) for each in WHO if claims.get(each)), "")
        found = claims.get(self.settings.oidc_claim)
        values = {str(each) for each in (found if isinstance(found, list) else [found])}
        for value, key in self._assigned.items():
            if value in values:
                return key, name
        log.warning("oidc.no_key", name=name, claim=self.settings.oidc_claim)
        detail = f"{name or 'This account'} is known, but no API key is meant for it. Ask your administrator."
        raise ProblemError(403, ProblemCode.FORBIDDEN, detail)

    async def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            claims: dict[str, Any] = jwt.decode(
                token,
                await self._key(kid),
                algorithms=ALGORITHMS,
                audience=self.settings.oidc_client_id,
                issuer=(await self._discover()).issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iat", "aud", "iss", "sub"]},
            )
        except (jwt.PyJWTError, KeyError) as error:
            log.warning("oidc.token_refused", error=repr(error))
            raise _unproven() from error
        if not secrets.compare_digest(str(claims.get("nonce", "")), nonce):
            raise _unproven()
        return claims

    async def _key(self, kid: str | None) -> jwt.PyJWK:
        """Return the provider's key with this id; the provider is asked again for a new one."""
        for keys in (self._keys, None):
            if keys is None:
                address = str((await self._discover()).jwks_uri)
                keys = self._keys = jwt.PyJWKSet.from_dict(await self._ask("GET", address))
            for each in keys.keys:
                if kid is None or each.key_id == kid:
                    return each
        raise KeyError(kid)

    async def _discover(self) -> Endpoints:
        if self._endpoints is None:
            issuer = self.settings.oidc_issuer.rstrip("/")
            try:
                found = Endpoints.model_validate(await self._ask("GET", f"{issuer}/.well-known/openid-configuration"))
            except ValidationError as error:
                log.warning("oidc.not_described", error=str(error))
                raise unavailable("The sign-in provider") from error
            if found.issuer.rstrip("/") != issuer:
                log.warning("oidc.another_issuer", expected=issuer, found=found.issuer)
                raise unavailable("The sign-in provider")
            self._endpoints = found
        return self._endpoints

    async def _ask(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        try:
            async with self.session.request(method, url, timeout=TIMEOUT, allow_redirects=False, **options) as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("oidc.no_answer", url=url, error=repr(error))
            raise unavailable("The sign-in provider") from error
        if answer.status >= 500:
            raise unavailable("The sign-in provider")
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if answer.status != 200 or not isinstance(found, dict):
            log.warning("oidc.refused", url=url, status=answer.status)
            raise _unproven()
        return found


def _unproven() -> ProblemError:
    return ProblemError(401, ProblemCode.UNAUTHENTICATED, "The sign-in provider did not say who you are. Try again.")
