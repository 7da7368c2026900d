"""Posting of deliveries: each webhook has a task of its own, so that a slow one does not hold up others."""

import asyncio
import base64
import hashlib
import hmac
import os
import random
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import aiohttp
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.admission.repository.access import write_audit
from services.admission.repository.webhooks import Attempt, WebhookRepository
from services.admission.webhooks.addresses import AddressRules, ForbiddenAddressError, checked_session, forbidden
from services.contracts.identity import Identity, Role
from services.contracts.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.release import RELEASE
from services.kit.tasks import end_tasks

PREFIX = "whsec_"


class Signer:
    """Derives the secrets of webhooks from the installation's own, so that the database holds none of them.

    Source: the Standard Webhooks specification, section "Signature scheme".
    """

    def __init__(self, installation_secret: str) -> None:
        self._key = installation_secret.encode()

    def secret(self, webhook_id: str, revision: int) -> str:
        """Return the secret of a webhook: 256 bits that only this installation can compute."""
        digest = hmac.new(self._key, f"webhook/{webhook_id}/{revision}".encode(), hashlib.sha256).digest()
        return PREFIX + base64.b64encode(digest).decode()


def fingerprint(secret: str) -> bytes:
    """Return a hash that shows later whether the installation's secret is still the one ``secret`` was derived from."""
    return hashlib.sha256(secret.encode()).digest()


def sign(secret: str, message_id: str, timestamp_s: int, body: str) -> str:
    """Return one signature for the header `webhook-signature`.

    Args:
        secret: ``whsec_`` and the key in base64.
        message_id: The header `webhook-id`.
        timestamp_s: The header `webhook-timestamp`, UTC seconds.
        body: The body as sent.
    """
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{message_id}.{timestamp_s}.{body}".encode()
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


log = Log(__name__)

BATCH = 8  #: Messages that one webhook is sent at once

FIRST_DELAY_S = 5.0
LONGEST_DELAY_S = 6 * 3_600.0
LONGEST_PAUSE_S = 300.0
LONGEST_RETRY_AFTER_S = 86_400.0
LEASE_MARGIN_S = 20.0
GONE = 410


class SendingRules(NamedTuple):
    """How long one attempt may take, and how long a failing message and a failing webhook are retried."""

    timeout_s: float
    retry_s: float
    disable_after_s: float


class Outcome(NamedTuple):
    """The outcome of an attempt; accepted if there is no ``error``."""

    status: int | None
    error: str | None
    retry_after_s: float = 0.0


class Sender:
    """Posts messages and stores the outcomes."""

    def __init__(
        self,
        engine: AsyncEngine,
        signer: Signer,
        addresses: AddressRules,
        rules: SendingRules,
        random_factor: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    ) -> None:
        self._engine, self._signer = engine, signer
        self._rules, self._random_factor = rules, random_factor
        self._sessions = {
            "https": checked_session(addresses, encrypted=True),
            "http": checked_session(addresses, encrypted=False),
        }
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """Stop sending; the next process attempts again what has not been accepted by then."""
        await end_tasks(self._tasks.values())
        for session in self._sessions.values():
            await session.close()

    async def start_due(self) -> None:
        """Start a task for each webhook that has messages to send but no task yet."""
        async with self._engine.connect() as connection:
            due = await WebhookRepository(connection).due()
        for webhook_id in due:
            if webhook_id not in self._tasks:
                task = asyncio.create_task(self._send_all(webhook_id), name=f"webhook-{webhook_id}")
                self._tasks[webhook_id] = task
                task.add_done_callback(lambda _, name=webhook_id: self._tasks.pop(name, None))

    async def _send_all(self, webhook_id: str) -> None:
        try:
            while await self.send(webhook_id):
                pass
        except Exception as error:  # mostly the database; the messages are due again after their lease
            log.warning("webhook.not_sent", webhook=webhook_id, error=str(error) or type(error).__name__)

    async def send(self, webhook_id: str) -> int:
        """Attempt the next messages of a webhook; return how many there were."""
        async with self._engine.begin() as connection:
            attempts = await WebhookRepository(connection).claim(webhook_id, batch=BATCH, lease_s=self.lease_s)
        outcomes = await asyncio.gather(*(self._attempt(attempt) for attempt in attempts), return_exceptions=True)
        if failed := [each for each in outcomes if each is not None]:
            raise failed[0]  # now that none of the others goes on alone
        return len(attempts)

    async def send_once(self, attempt: Attempt) -> None:
        """Attempt a message once, whether or not its webhook is enabled."""
        outcome = await self._post(attempt)
        async with self._engine.begin() as connection:
            repository = WebhookRepository(connection)
            if outcome.error is None:
                await repository.succeeded(attempt.webhook_id)
            state = "delivered" if outcome.error is None else "failed"
            await repository.end(attempt, state, outcome.status, outcome.error)

    @property
    def lease_s(self) -> float:
        """How long an attempt is this process's."""
        return self._rules.timeout_s + LEASE_MARGIN_S

    async def _attempt(self, attempt: Attempt) -> None:
        outcome = await self._post(attempt)
        async with self._engine.begin() as connection:
            repository = WebhookRepository(connection)
            if outcome.error is None:
                await repository.succeeded(attempt.webhook_id)
                await repository.end(attempt, "delivered", outcome.status, None)
                return
            # The webhook's row is locked before those of its messages, as by whoever disables it.
            is_hopeless = await repository.failed(
                attempt.webhook_id,
                wait_s=outcome.retry_after_s,
                longest_s=LONGEST_PAUSE_S,
                disable_after_s=self._rules.disable_after_s,
            )
            delay_s = max(delay_after_s(attempt.attempts) * self._random_factor(), outcome.retry_after_s)
            if attempt.age_s + delay_s > self._rules.retry_s:
                await repository.end(attempt, "failed", outcome.status, outcome.error)
            else:
                await repository.postpone(attempt, delay_s, outcome.status, outcome.error)
            if is_hopeless:
                days = self._rules.disable_after_s / 86_400
                await self._disable(connection, attempt.webhook_id, f"nothing could be delivered for {days:g} days")
            elif outcome.status == GONE:
                await self._disable(connection, attempt.webhook_id, "its address answered 410 Gone")

    @staticmethod
    async def _disable(connection: AsyncConnection, webhook_id: str, reason: str) -> None:
        repository = WebhookRepository(connection)
        found = await repository.find(webhook_id, None, lock=True)
        if found is None or not found.enabled:
            return
        await repository.disable(found.id, reason)
        nobody = Identity(tenant_id=found.tenant_id, role=Role.ADMIN, key_id="")
        await write_audit(connection, nobody, "webhook.disabled", found.id, url=found.url, reason=reason)
        log.warning("webhook.disabled", webhook=found.id, reason=reason)

    async def _post(self, attempt: Attempt) -> Outcome:
        secret = self._signer.secret(attempt.webhook_id, attempt.secret_revision)
        if fingerprint(secret) != attempt.secret_sha256:
            return Outcome(None, "the installation's secret was replaced: rotate the webhook's secret")
        revisions = [attempt.secret_revision, *([attempt.secret_revision - 1] if attempt.overlaps else [])]
        now_s = int(time.time())
        signatures = (
            sign(self._signer.secret(attempt.webhook_id, revision), attempt.id, now_s, attempt.body)
            for revision in revisions
        )
        headers = {
            "content-type": "application/json",
            "user-agent": f"Wattshift/{RELEASE}",
            ID_HEADER: attempt.id,
            TIMESTAMP_HEADER: str(now_s),
            SIGNATURE_HEADER: " ".join(signatures),
        }
        scheme = attempt.url.partition(":")[0].lower()
        try:
            async with self._sessions[scheme].post(
                attempt.url,
                data=attempt.body.encode(),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._rules.timeout_s),
            ) as answer:
                return _outcome(answer)  # the status is all that counts; the body is never read
        except TimeoutError:
            return Outcome(None, f"no answer within {self._rules.timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome(None, _reason(error, scheme))


def delay_after_s(attempts: int) -> float:
    """Return how long to wait after this many attempts: 5 s, 15 s, 45 s, ... up to 6 hours."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 3.0 ** min(attempts - 1, 20))


def _outcome(answer: aiohttp.ClientResponse) -> Outcome:
    if 200 <= answer.status < 300:
        return Outcome(answer.status, None)
    if 300 <= answer.status < 400:
        return Outcome(answer.status, f"answered {answer.status}; redirects are not followed")
    return Outcome(answer.status, f"answered {answer.status}", retry_after_s(answer.headers.get("retry-after", "")))


def retry_after_s(text: str) -> float:
    """Return the seconds that a `Retry-After` header asks to wait, at most a day; 0 if it says nothing."""
    if text.isascii() and text.isdigit():
        return min(LONGEST_RETRY_AFTER_S, float(text))
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(LONGEST_RETRY_AFTER_S, max(0.0, (at - utc_now()).total_seconds()))


def _reason(error: Exception, scheme: str) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ForbiddenAddressError):
        return forbidden(scheme == "https")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name has no address"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {os.strerror(error.os_error.errno or 0)}"
    return f"no valid answer: {type(error).__name__}"
