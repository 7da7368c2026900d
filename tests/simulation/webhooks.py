"""Messages to webhooks on their way: the real `Sender`, which posts for each webhook in a task of its own.

What its repository says in SQL is said of rows in memory here, by the same rules: a message is claimed for the length
of a lease, and what became of an attempt counts only if no later one has begun. A transaction is kept whole or not at
all, and its answer may be lost. The sender is killed and followed by another one, and for a while there are two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from services.admission.repository.webhooks import Attempt, NewDelivery
from services.admission.webhooks import sending
from services.admission.webhooks.addresses import ForbiddenAddressError
from services.admission.webhooks.sending import Sender, SendingRules, Signer, fingerprint
from services.contracts.webhooks import ID_HEADER
from tests.simulation.loop import Simulation

RULES = SendingRules(timeout_s=2.0, retry_s=10_000.0, disable_after_s=1e9)
LOOK_S, BATCH = 1.0, 2
REPLACED = "secret was replaced"
MOST_GONE = 6
"""How often the answer that a receiver is gone for good may be lost with its transaction, or be given at once."""
CALM_S = 700.0
"""Within this time whatever waits for another attempt has had one that was accepted."""


@dataclass
class _Message:
    """A message to one webhook."""

    id: str
    webhook: str
    made_s: float
    state: str = "pending"
    attempts: int = 0
    due_s: float = 0.0


@dataclass
class _Webhook:
    """A webhook, and how long it is to be left alone."""

    id: str
    enabled: bool = True
    failures: int = 0
    paused_until_s: float = 0.0
    is_deleted: bool = False
    has_lost_secret: bool = False


@dataclass
class _World:
    """The rows, and what receivers have seen.

    Attributes:
        posting: Messages that are being posted now, by sender and webhook.
        accepted: How often each message was accepted.
        now_posted: Messages that are being posted.
        answered: The status of the last answer to each message.
        gone: How often the receiver of a webhook said that it is gone for good.
        reasons: What is to be said of the last attempt at each message that was not answered.
    """

    simulation: Simulation
    webhooks: dict[str, _Webhook] = field(default_factory=dict[str, _Webhook])
    messages: dict[str, _Message] = field(default_factory=dict[str, _Message])
    posting: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    accepted: dict[str, int] = field(default_factory=dict[str, int])
    now_posted: set[str] = field(default_factory=set[str])
    answered: dict[str, int | None] = field(default_factory=dict[str, int | None])
    gone: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self.simulation.loop.time()

    def has_answered(self, webhook: str) -> bool:
        """Whether a receiver's last answer to any message was that it has taken it."""
        mine = [each.id for each in self.messages.values() if each.webhook == webhook]
        return any((self.answered.get(each) or 0) in range(200, 300) for each in mine)

    def pending(self, webhook: str) -> list[_Message]:
        """Return what is due of a webhook that is enabled and not paused."""
        found = self.webhooks[webhook]
        if not found.enabled or found.paused_until_s > self.now_s:
            return []
        return [
            each
            for each in self.messages.values()
            if each.webhook == webhook and each.state == "pending" and each.due_s <= self.now_s
        ]


_MESSAGES = "messages"


class _Connection:
    """A transaction: what it changes is kept at its end."""

    def __init__(self, world: _World) -> None:
        self.world = world
        self.changes: list[Callable[[], None]] = []
        self.gone: set[str] = set()
        self.locked: set[str] = set()

    def lock(self, name: str) -> None:
        """Lock a webhook, or its messages after it: who locks both in another order may wait for who waits for it."""
        if name not in self.locked:
            is_in_order = name == _MESSAGES or _MESSAGES not in self.locked
            self.world.simulation.check("rows are locked in one order", is_in_order, name)
        self.locked.add(name)


class _Engine:
    """The database, in the place of an ``AsyncEngine``."""

    def __init__(self, world: _World) -> None:
        self._world = world

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Connection]:
        """Yield a transaction."""
        connection = _Connection(self._world)
        await asyncio.sleep(0)
        yield connection

        def commit() -> None:
            for change in connection.changes:
                change()
            left = [name for name in sorted(connection.gone) if self._world.webhooks[name].enabled]
            self._world.simulation.check("whoever is gone for good is disabled", not left, str(left))

        await self._world.simulation.boundary(commit, ConnectionError("lost"))

    connect = begin


class _Repository:
    """The statements of ``WebhookRepository`` that a sender needs."""

    def __init__(self, connection: _Connection) -> None:
        self._connection, self._world = connection, connection.world

    async def due(self) -> list[str]:
        """As of the real one."""
        return [name for name in self._world.webhooks if self._world.pending(name)]

    async def claim(self, webhook_id: str, *, batch: int, lease_s: float) -> list[Attempt]:
        """As of the real one, which locks what it claims: rows are taken here at once."""
        world = self._world
        most = 1 if world.webhooks[webhook_id].failures else batch
        claimed = world.pending(webhook_id)[:most]
        for each in claimed:
            each.attempts += 1
            each.due_s = world.now_s + lease_s
        secret = self._secret(webhook_id)
        for each in claimed:
            self._expect(each.id, webhook_id)
        ages_s, url = [world.now_s - each.made_s for each in claimed], "http://there"
        return [
            Attempt(each.id, "{}", each.attempts, age_s, webhook_id, url, 1, secret, overlaps=False)
            for each, age_s in zip(claimed, ages_s, strict=True)
        ]

    def _secret(self, webhook_id: str) -> bytes:
        found = self._world.webhooks[webhook_id]
        return b"of another installation" if found.has_lost_secret else fingerprint(SIGNER.secret(webhook_id, 1))

    def _expect(self, message_id: str, webhook_id: str) -> None:
        self._world.reasons[message_id] = ""
        if self._world.webhooks[webhook_id].has_lost_secret:
            self._world.answered[message_id], self._world.reasons[message_id] = None, REPLACED

    async def claim_new(self, delivery: NewDelivery, lease_s: float) -> Attempt:
        """As of the real one."""
        await asyncio.sleep(0)
        world = self._world
        due_s = world.now_s + lease_s
        message = _Message(delivery.id, delivery.webhook_id, world.now_s, attempts=1, due_s=due_s)
        world.messages.setdefault(message.id, message)
        self._expect(delivery.id, delivery.webhook_id)
        secret = self._secret(delivery.webhook_id)
        return Attempt(delivery.id, "{}", 1, 0.0, delivery.webhook_id, "http://there", 1, secret, overlaps=False)

    def _check(self, attempt: Attempt, status: int | None, error: str | None) -> None:
        """An attempt is told as it was."""
        answered, check = self._world.answered.get(attempt.id), self._world.simulation.check
        check("an attempt is told as it was", status == answered, f"{attempt.id}: {answered}, told {status}")
        is_accepted = status is not None and 200 <= status < 300
        is_redirect = status is not None and 300 <= status < 400
        is_told = is_accepted is (error is None) and ("redirect" in (error or "")) is is_redirect
        check("an attempt is told as it was", is_told, f"{attempt.id}: {status} {error}")
        reason = self._world.reasons.get(attempt.id, "") if status is None else ""
        check("an attempt is told as it was", reason in (error or ""), f"{attempt.id}: {error}, which is {reason}")

    def _note(self, attempt: Attempt, status: int | None, **values: Any) -> None:
        self._connection.lock(_MESSAGES)
        if status == sending.GONE and not attempt.id.startswith("t"):  # of what is only tried, no more is learned
            self._connection.gone.add(attempt.webhook_id)

        def note() -> None:
            message = self._world.messages[attempt.id]
            if message.state == "pending" and message.attempts == attempt.attempts:
                for name, value in values.items():
                    setattr(message, name, value)

        self._connection.changes.append(note)

    async def end(self, attempt: Attempt, state: str, status: int | None, error: str | None) -> None:
        """As of the real one."""
        await asyncio.sleep(0)
        self._check(attempt, status, error)
        self._note(attempt, status, state=state)

    async def postpone(self, attempt: Attempt, delay_s: float, status: int | None, error: str | None) -> None:
        """As of the real one."""
        self._check(attempt, status, error)
        self._note(attempt, status, due_s=self._world.now_s + delay_s)

    async def succeeded(self, webhook_id: str) -> None:
        """As of the real one."""
        self._connection.lock(webhook_id)
        found = self._world.webhooks[webhook_id]
        self._world.simulation.check("an attempt is told as it was", self._world.has_answered(webhook_id), webhook_id)
        self._connection.changes.append(lambda: _set(found, failures=0, paused_until_s=0.0))

    async def failed(self, webhook_id: str, *, wait_s: float, longest_s: float, disable_after_s: float) -> bool:
        """As of the real one."""
        self._connection.lock(webhook_id)
        found = self._world.webhooks[webhook_id]
        pause_s = max(min(longest_s, 2.0**found.failures), wait_s)
        until_s = self._world.now_s + pause_s
        self._connection.changes.append(lambda: _set(found, failures=found.failures + 1, paused_until_s=until_s))
        return False

    async def find(self, webhook_id: str, tenant_id: str | None, *, lock: bool = False) -> Any:
        """As of the real one."""
        if lock:
            self._connection.lock(webhook_id)
        found = self._world.webhooks[webhook_id]
        if found.is_deleted:
            return None
        return SimpleNamespace(id=found.id, enabled=found.enabled, tenant_id="acme", url="http://there")

    async def disable(self, webhook_id: str, reason: str) -> None:
        """As of the real one."""
        found = self._world.webhooks[webhook_id]
        is_there = found.enabled and not found.is_deleted
        self._world.simulation.check("only a webhook that is there and enabled is disabled", is_there, webhook_id)
        is_true = "410" in reason and webhook_id in self._connection.gone
        self._world.simulation.check("who is disabled is told a reason that is true", is_true, reason)
        self._connection.changes.append(lambda: _set(found, enabled=False))


def _set(row: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(row, name, value)


SIGNER = Signer("secret of this installation")


class _Session:
    """The receivers, as a sender reaches them."""

    def __init__(self, world: _World, sender: int) -> None:
        self._world, self._sender = world, sender

    @asynccontextmanager
    async def post(self, url: str, *, headers: dict[str, str], **_: Any) -> AsyncIterator[Any]:
        """Answer a message, or do not."""
        world, draw = self._world, self._world.simulation.choices.below
        message = world.messages[headers[ID_HEADER]]
        check = world.simulation.check
        is_over = message.state in ("delivered", "failed")  # it may be deleted while it is on its way
        check("what is over is not sent again", not is_over, message.id)
        check("a message is sent once at a time", message.id not in world.now_posted, message.id)
        key = (self._sender, message.webhook)
        is_tried = message.id.startswith("t")
        world.posting[key] = world.posting.get(key, 0) + (not is_tried)
        world.now_posted.add(message.id)
        world.answered[message.id] = None
        check("who is gone for good is left alone", world.gone.get(message.webhook, 0) < MOST_GONE, message.webhook)
        try:
            await asyncio.sleep(0.1 * draw(4, often=0.3))
            check("nothing is signed with another secret", world.reasons.get(message.id) != REPLACED, message.id)
            outcome = 0 if world.simulation.is_calm else draw(7, often=0.4)
            world.reasons[message.id] = {3: "no valid answer", 4: "no answer within"}.get(outcome, "")
            if outcome == 6:
                error, world.reasons[message.id] = _unreachable(draw(4))
                raise error
            if outcome in (0, 4):
                world.accepted[message.id] = world.accepted.get(message.id, 0) + 1
            if outcome == 3:
                raise aiohttp.ServerDisconnectedError
            if outcome == 4:  # it arrived, and its answer is lost
                await asyncio.sleep(RULES.timeout_s)
                raise TimeoutError
            status = (204, 500, 302, 0, 0, (410, 429)[draw(2)])[outcome]
            world.answered[message.id] = status
            world.gone[message.webhook] = world.gone.get(message.webhook, 0) + (status == 410)
            yield SimpleNamespace(status=status, headers={"retry-after": "7"} if status == 429 else {})
        finally:
            world.posting[key] = world.posting.get(key, 0) - (not is_tried)
            world.now_posted.discard(message.id)

    async def close(self) -> None:
        """Close it."""


def _unreachable(which: int) -> tuple[Exception, str]:
    """Return why an address cannot be connected to, and what is to be said of that."""
    key = cast(Any, SimpleNamespace(host="there", port=1, ssl=True, is_ssl=True))
    match which:
        case 1:
            return aiohttp.ClientConnectorError(key, ForbiddenAddressError("10.0.0.1")), "must be https"
        case 2:
            return aiohttp.ClientConnectorCertificateError(key, ValueError("odd")), "its certificate is not valid"
        case 3:
            return aiohttp.ClientConnectorDNSError(key, OSError("unknown")), "its name has no address"
        case _:
            return aiohttp.ClientConnectorError(key, OSError(111, "refused")), "cannot connect: "


async def play(simulation: Simulation) -> None:
    """Messages are made, sent, refused and sent again, while senders die and return; each ends, and none is doubled."""
    draw = simulation.choices.below
    world = _World(simulation, {name: _Webhook(name) for name in ("w1", "w2", "w3")[: 1 + draw(3)]})
    simulation.most_steps = 20_000
    simulation.holds("no webhook is sent more at once than may be", lambda: _too_many(world))
    simulation.instead(sending, BATCH=BATCH, WebhookRepository=_Repository, write_audit=_nothing)
    numbers = 0
    sender, looking, process = await _begin(world, numbers)
    for number in range(1 + draw(20)):
        await asyncio.sleep(0.2 * draw(8))
        webhook = list(world.webhooks)[draw(len(world.webhooks))]
        world.messages[f"m{number}"] = _Message(f"m{number}", webhook, world.now_s, due_s=world.now_s)
        await _use(world, draw(24), webhook, process, sender)
        if draw(12) == 1:
            numbers += 1
            if draw(2):
                process.kill()
            else:
                looking.cancel()
                await process.start(sender.aclose())
                left = [each for each in sender._tasks.values() if not each.done()]
                simulation.check("a sender that has ended has no tasks", not left, str(left))
            world.now_posted.clear()
            world.posting = {key: count for key, count in world.posting.items() if key[0] == numbers}
            sender, looking, process = await _begin(world, numbers)
    simulation.calm_down()
    await asyncio.sleep(CALM_S)
    messages = world.messages.values()
    left = [each.id for each in messages if each.state == "pending" and world.webhooks[each.webhook].enabled]
    simulation.check("every message ends", not left, str(left))
    untrue = [each.id for each in messages if each.state == "delivered" and not world.accepted.get(each.id)]
    simulation.check("what counts as delivered was accepted", not untrue, str(untrue))
    looking.cancel()
    await process.start(sender.aclose())


async def _use(world: _World, which: int, webhook: str, process: Any, sender: Sender) -> None:
    """Have users try a webhook, disable it, delete it, or the installation lose its secret."""
    found = world.webhooks[webhook]
    match which:
        case 1 | 2 if not found.is_deleted and world.gone.get(webhook, 0) < MOST_GONE:
            process.start(_try(world, sender, NewDelivery(f"t{len(world.messages)}", webhook, "test", "{}")))
        case 3:
            found.enabled = False
        case 4:
            found.enabled, found.is_deleted = False, True
            for each in world.messages.values():
                if each.webhook == webhook and each.state == "pending":
                    each.state = "deleted"
        case 5:
            found.has_lost_secret = True
            await asyncio.sleep(3.0)
            found.has_lost_secret = False
        case _:
            pass


async def _try(world: _World, sender: Sender, delivery: NewDelivery) -> None:
    with suppress(ConnectionError):
        async with _Engine(world).begin() as connection:
            attempt = await _Repository(connection).claim_new(delivery, sender.lease_s)
        await sender.send_once(attempt)
        message = world.messages[delivery.id]
        has_taken = world.answered.get(message.id) in range(200, 300)
        is_told = message.state == ("delivered" if has_taken else "failed") or message.attempts > 1
        is_told |= message.state == "deleted"
        world.simulation.check("an attempt is told as it was", is_told, f"{message}: {world.answered.get(message.id)}")


async def _begin(world: _World, number: int) -> tuple[Sender, asyncio.Task[None], Any]:
    process = world.simulation.process()
    sender = Sender.__new__(Sender)
    made = cast(Any, sender)
    made._engine, made._signer, made._rules = _Engine(world), SIGNER, RULES
    made._random_factor = lambda: 1.0
    made._sessions = {"http": _Session(world, number)}
    made._tasks = {}
    made.send = world.simulation.judged(_told(world, made), ConnectionError)

    async def look() -> None:
        while True:
            with suppress(ConnectionError):
                await sender.start_due()
            await asyncio.sleep(LOOK_S)

    return sender, process.start(look()), process


def _told(world: _World, sender: Any) -> Callable[[str], Coroutine[Any, Any, int]]:
    """Have whoever sends hear of what could not be stored: then nothing more is sent before the next look."""
    attempt, send, failed = sender._attempt, sender.send, set[str]()

    async def noted(each: Attempt) -> None:
        try:
            await attempt(each)
        except Exception:
            failed.add(each.webhook_id)
            raise

    async def judge(webhook_id: str) -> int:
        failed.discard(webhook_id)
        count = await send(webhook_id)
        world.simulation.check("what could not be stored is told", webhook_id not in failed, webhook_id)
        return count

    sender._attempt = noted
    return judge


async def _nothing(*_: Any, **__: Any) -> None: ...


def _too_many(world: _World) -> str | None:
    return next((f"{key}: {count}" for key, count in world.posting.items() if not 0 <= count <= BATCH), None)
