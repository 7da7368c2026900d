"""Webhooks: who may have what sent, and messages from the event to their acceptance."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.budgets import Budgets
from services.admission.repository.webhooks import WebhookRepository
from services.admission.webhooks.addresses import AddressRules
from services.admission.webhooks.sending import Sender, SendingRules, Signer
from services.admission.webhooks.service import Publisher
from services.db.database import Database
from services.db.engine import create_engine
from services.scheduler.repository import gangs
from tests.admission.conftest import admission_on
from tests.admission.installation import Admission
from tests.admission.webhook_receiver import Received, Receiver, receiving
from tests.support.services import TOKEN

LOOPBACK = AddressRules([ip_network("127.0.0.0/8")])
RULES = SendingRules(timeout_s=5, retry_s=100, disable_after_s=5 * 86_400)


@pytest.fixture(scope="module")
async def admission(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Admission]:
    """Admission whose own loops do nothing for as long as the tests run."""
    folder: Path = tmp_path_factory.mktemp("admission")
    quiet = {"webhook_poll_s": 3_600.0, "budget_interval_s": 3_600.0}
    async with admission_on(database_url, redis_url, folder, webhook_networks="127.0.0.0/8", **quiet) as found:
        yield found


@pytest.fixture(scope="module")
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(database_url)
    yield made
    await made.dispose()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


class PatientPublisher(Publisher):
    """Makes messages of all that happened before it was asked, however recent.

    The product leaves what any open transaction of the server could still precede, an ANALYZE of autovacuum among them,
    for its next poll; a test has no next poll.
    """

    def __init__(self, engine: AsyncEngine, settle_s: float = 0) -> None:
        super().__init__(engine, settle_s)
        self._of = engine

    async def publish(self) -> int:
        async with self._of.connect() as connection:
            connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
            last = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
            end = (await connection.execute(last)).scalar_one()
            first = text("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            async with asyncio.timeout(60):
                while (await connection.execute(first)).scalar_one() < end:  # noqa: ASYNC110, of another process
                    await asyncio.sleep(0.01)
        return await super().publish()


@dataclass
class Post:
    """A tenant, the receiver of its webhooks, and what makes messages of its events and sends them when asked to."""

    admission: Admission
    tenant: str
    receiver: Receiver
    engine: AsyncEngine
    publisher: Publisher
    sender: Sender

    async def ask(self, method: str, path: str, tenant: str | None = None, **options: Any) -> httpx.Response:
        return await self.admission.ask(method, path, tenant=tenant or self.tenant, **options)

    async def create(self, path: str = "", role: str = "user", **spec: Any) -> dict[str, Any]:
        """Make a webhook for ends of jobs, if nothing else is said, that leads to the receiver."""
        body = {"url": self.receiver.url + path, "events": ["job.ended"], **spec}
        answer = await self.ask("POST", "/v1/webhooks", role=role, json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def show(self, webhook: dict[str, Any]) -> dict[str, Any]:
        answer = await self.ask("GET", f"/v1/webhooks/{webhook['id']}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def end_a_job(self, **spec: Any) -> str:
        job_id = await self.admission.submit(spec, tenant=self.tenant)
        await self.admission.end(job_id)
        return job_id

    async def run_a_job(self, **spec: Any) -> str:
        job_id = await self.admission.submit(spec, tenant=self.tenant)
        await self.admission.start(job_id)
        await self.execute(
            "INSERT INTO job_events (job_id, tenant_id, type, data) VALUES ($1, $2, 'job.running', '{}')",
            job_id,
            self.tenant,
        )
        return job_id

    async def deliver(self, webhook: dict[str, Any]) -> None:
        """Let a job end, and send all that a webhook is due."""
        await self.end_a_job()
        await self.publisher.publish()
        await self.sender.send(webhook["id"])

    async def make_due(self, webhook: dict[str, Any], *, older_s: float = 0) -> None:
        """Let the time of the next attempt come."""
        await self.execute("UPDATE webhooks SET paused_until = NULL WHERE id = $1", webhook["id"])
        await self.execute(
            "UPDATE webhook_deliveries SET next_attempt_at = now(), created_at = created_at - "
            "make_interval(secs => $2) WHERE webhook_id = $1 AND state = 'pending'",
            webhook["id"],
            older_s,
        )

    async def execute(self, statement: str, *values: Any) -> None:
        await self.admission.database.execute(statement, *values)


@pytest.fixture
async def post(
    admission: Admission, engine: AsyncEngine, receiver: Receiver, request: pytest.FixtureRequest
) -> AsyncIterator[Post]:
    """A tenant for this test alone, so that the webhooks of others are sent nothing of it."""
    tenant = await admission.make_tenant("t" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12])
    async with contextlib.aclosing(Sender(engine, Signer(TOKEN), LOOPBACK, RULES, random_factor=lambda: 1.0)) as sender:
        yield Post(admission, tenant, receiver, engine, PatientPublisher(engine), sender)


def signatures(secret: str, received: Received) -> list[str]:
    """Return which signatures of a message are by ``secret``, computed here from the specification."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{received.headers['webhook-id']}.{received.headers['webhook-timestamp']}.".encode() + received.body
    right = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return [each for each in received.headers["webhook-signature"].split(" ") if each == right]


async def test_the_end_of_a_job_is_posted_with_its_footprint_and_a_signature(post: Post) -> None:
    made = await post.create("/hook?a=1", project="vision")
    job_id = await post.end_a_job(project="vision")
    await post.end_a_job(project="speech")
    await post.execute(
        "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, carbon_gco2, gpu_s, estimated_energy_j) "
        "VALUES ($1, 7200, 7000, 0.5, 60, 200)",
        job_id,
    )

    assert await post.publisher.publish() == 1
    assert await post.sender.send(made["id"]) == 1
    assert await post.sender.send(made["id"]) == 0

    (received,) = post.receiver.received
    assert received.path == "/hook"
    assert abs(int(received.headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60
    assert len(signatures(made["secret"], received)) == 1
    assert received.message["type"] == "job.ended"
    data = received.message["data"]
    assert (data["job_id"], data["project"], data["state"], data["tenant_id"]) == (
        job_id,
        "vision",
        "succeeded",
        post.tenant,
    )
    assert (data["footprint"]["energy_j"], data["footprint"]["carbon_gco2"]) == (7200, 0.5)
    (delivery,) = (await post.show(made))["deliveries"]
    assert (delivery["id"], delivery["state"]) == (received.headers["webhook-id"], "delivered")
    assert (delivery["status"], delivery["attempts"], delivery["error"]) == (204, 1, None)


async def test_a_job_that_asks_has_its_start_and_end_posted_to_a_webhook_for_either(post: Post) -> None:
    for_ends = await post.create(project="vision")
    of_budgets = await post.create(events=["budget.exceeded"])
    quiet = await post.run_a_job(project="vision")
    elsewhere = await post.run_a_job(project="speech", notify=["started", "ended"])
    asks = await post.run_a_job(project="vision", notify=["started"])

    assert await post.publisher.publish() == 1
    for job_id in (quiet, elsewhere, asks):
        await post.admission.end(job_id, "failed")
    assert await post.publisher.publish() == 2
    assert await post.publisher.publish() == 0
    while await post.sender.send(for_ends["id"]):
        pass
    assert (await post.show(of_budgets))["deliveries"] == []

    got = [(each.message["type"], each.message["data"]["job_id"]) for each in post.receiver.received]
    assert sorted(got) == sorted([("job.started", asks), ("job.ended", quiet), ("job.ended", asks)])
    (started,) = [each.message for each in post.receiver.received if each.message["type"] == "job.started"]
    assert started["data"].keys() == {"job_id", "tenant_id", "name", "project", "submitted_at", "started_at"}
    assert started["timestamp"] == started["data"]["started_at"]


@pytest.mark.parametrize(
    ("events", "notify", "ends_as", "sent"),
    [
        (["job.started"], None, "failed", ["job.started"]),
        (["job.started"], ["failed"], "failed", ["job.started", "job.ended"]),
        (["job.started"], ["failed"], "succeeded", ["job.started"]),
        (["job.started"], ["ended"], "succeeded", ["job.started", "job.ended"]),
        (["job.started", "job.ended"], ["started", "ended", "failed"], "failed", ["job.started", "job.ended"]),
        (["job.ended"], ["failed"], "succeeded", ["job.ended"]),
        (["budget.exceeded"], ["started", "ended"], "failed", []),
    ],
)
async def test_what_is_sent_is_what_the_webhook_takes_and_what_the_job_asks_for(
    post: Post, events: list[str], notify: list[str] | None, ends_as: str, sent: list[str]
) -> None:
    made = await post.create(events=events)
    job_id = await post.run_a_job(notify=notify)
    await post.admission.end(job_id, ends_as)
    await post.publisher.publish()

    assert [each["event"] for each in reversed((await post.show(made))["deliveries"])] == sent


async def test_a_start_is_not_held_back_for_the_reports_that_an_end_waits_for(post: Post) -> None:
    await post.create(events=["job.started", "job.ended"])
    job_id = await post.run_a_job()
    await post.admission.end(job_id)

    assert await PatientPublisher(post.engine, settle_s=3_600).publish() == 1
    assert await post.publisher.publish() == 1


async def test_an_end_becomes_one_message_also_with_two_processes_and_not_too_early(post: Post) -> None:
    made = await post.create()
    job_id = await post.end_a_job()

    assert await PatientPublisher(post.engine, settle_s=3_600).publish() == 0, "its nodes may still report energy"
    counts = await asyncio.gather(*(PatientPublisher(post.engine).publish() for _ in range(3)))

    assert sum(counts) == 1
    later = await post.end_a_job()
    assert await PatientPublisher(post.engine).publish() == 1
    query = "SELECT body::jsonb #>> '{data,job_id}' FROM webhook_deliveries WHERE webhook_id = $1 ORDER BY id"
    assert [row[0] for row in await post.admission.database.fetch(query, made["id"])] == [job_id, later]


async def test_a_webhook_is_sent_nothing_from_before_it_was_made(post: Post) -> None:
    await post.end_a_job()
    made = await post.create()
    await post.publisher.publish()
    assert (await post.show(made))["deliveries"] == []


async def test_a_message_that_is_refused_is_sent_again_with_the_same_id_and_body(post: Post) -> None:
    made = await post.create()
    post.receiver.answers = [(500, {}), (302, {"location": post.receiver.url + "/elsewhere"})]
    await post.deliver(made)
    assert await post.sender.send(made["id"]) == 0, "not before its time"
    (first,) = (await post.show(made))["deliveries"]
    assert (first["state"], first["status"], first["error"]) == ("pending", 500, "answered 500")
    await post.make_due(made)
    await post.sender.send(made["id"])
    (second,) = (await post.show(made))["deliveries"]
    assert second["error"] == "answered 302; redirects are not followed"
    assert (await post.show(made))["failing_since"] is not None
    await post.make_due(made)
    await post.sender.send(made["id"])

    assert [each.path for each in post.receiver.received] == ["/", "/", "/"]
    assert len({(each.headers["webhook-id"], each.body) for each in post.receiver.received}) == 1
    found = await post.show(made)
    assert (found["deliveries"][0]["state"], found["deliveries"][0]["attempts"]) == ("delivered", 3)
    assert found["failing_since"] is None


async def test_an_outcome_that_comes_after_a_later_attempt_began_counts_for_nothing(post: Post) -> None:
    made = await post.create("/slow")
    post.receiver.answers = [(500, {})]
    await post.end_a_job()
    await post.publisher.publish()
    await post.make_due(made, older_s=99)  # the last attempt before it would be given up
    slow = asyncio.create_task(post.sender.send(made["id"]))
    await post.receiver.has("/slow")
    await post.make_due(made)
    async with post.engine.begin() as connection:
        (later,) = await WebhookRepository(connection).claim(made["id"], batch=1, lease_s=60)
    post.receiver.released.set()
    await slow

    (delivery,) = (await post.show(made))["deliveries"]
    assert (later.attempts, delivery["state"], delivery["error"]) == (2, "pending", None)


async def test_a_process_that_dies_in_an_attempt_leaves_it_to_the_next(post: Post) -> None:
    made = await post.create("/slow")
    await post.end_a_job()
    await post.publisher.publish()
    slow = asyncio.create_task(post.sender.send(made["id"]))
    await post.receiver.has("/slow")
    async with contextlib.aclosing(Sender(post.engine, Signer(TOKEN), LOOPBACK, RULES)) as other:
        assert await other.send(made["id"]) == 0, "one process attempts it"
        await post.make_due(made)  # as when the lease has ended
        again = asyncio.create_task(other.send(made["id"]))
        await post.receiver.has("/slow", times=2)
        post.receiver.released.set()
        assert await again == 1
        await slow

    assert len({each.headers["webhook-id"] for each in post.receiver.received}) == 1
    (delivery,) = (await post.show(made))["deliveries"]
    assert (delivery["state"], delivery["attempts"]) == ("delivered", 2)


async def test_retry_after_is_respected_and_messages_are_given_up_in_the_end(post: Post) -> None:
    made = await post.create()
    post.receiver.answers = [(503, {"retry-after": "60"}), (500, {})]
    await post.deliver(made)
    waits = await post.admission.database.fetchrow(
        "SELECT d.next_attempt_at > now() + interval '50 s', w.paused_until > now() + interval '50 s' "
        "FROM webhooks w JOIN webhook_deliveries d ON d.webhook_id = w.id WHERE w.id = $1",
        made["id"],
    )
    assert tuple(waits) == (True, True)
    await post.make_due(made, older_s=99)
    await post.sender.send(made["id"])

    found = await post.show(made)
    (delivery,) = found["deliveries"]
    assert (delivery["state"], delivery["attempts"], delivery["next_attempt_at"]) == ("failed", 2, None)
    assert found["enabled"]


@pytest.mark.parametrize(
    ("status", "reason"), [(410, "its address answered 410 Gone"), (500, "nothing could be delivered for 5 days")]
)
async def test_an_address_that_is_gone_or_only_failed_for_days_is_disabled(
    post: Post, status: int, reason: str
) -> None:
    made = await post.create()
    post.receiver.answers = [(status, {})] * (2 if status == 410 else 1)  # one at a time to an address that fails
    for _ in range(2):
        await post.end_a_job()
    if status == 500:
        await post.execute(
            "UPDATE webhooks SET failing_since = now() - interval '6 days', failures = 9 WHERE id = $1", made["id"]
        )
    await post.publisher.publish()
    await post.sender.send(made["id"])
    await post.end_a_job()
    await post.publisher.publish()

    found = await post.show(made)
    assert (found["enabled"], found["disabled_reason"]) == (False, reason)
    assert [delivery["state"] for delivery in found["deliveries"]] == ["failed", "failed"]
    entries = (await post.admission.ask("GET", "/v1/audit?action=webhook.disabled", role="operator")).json()["items"]
    assert (entries[0]["target"], entries[0]["data"]["reason"]) == (made["id"], reason)
    changed = await post.ask("PATCH", f"/v1/webhooks/{made['id']}", json={"enabled": True})
    assert changed.json()["enabled"]
    await post.end_a_job()
    await post.publisher.publish()
    assert await post.sender.send(made["id"]) == 1
    assert (await post.show(made))["deliveries"][0]["state"] == "delivered"


async def test_a_slow_address_delays_no_other(post: Post) -> None:
    slow = await post.create("/slow")
    for _ in range(3):
        await post.end_a_job()
    await post.publisher.publish()
    await post.sender.start_due()
    await post.receiver.has("/slow")
    quick = await post.create("/quick")
    await post.end_a_job()
    await post.publisher.publish()
    await post.sender.start_due()
    await post.receiver.has("/quick")

    states = {delivery["state"] for delivery in (await post.show(slow))["deliveries"]}
    assert states == {"pending"}
    assert quick["id"] != slow["id"]


async def test_a_rotated_secret_overlaps_and_that_of_another_installation_is_noticed(post: Post) -> None:
    made = await post.create()
    path = f"/v1/webhooks/{made['id']}/rotate"
    new = (await post.ask("POST", path, json={"overlap_s": 60})).json()["secret"]
    await post.deliver(made)
    (received,) = post.receiver.received
    assert [len(signatures(secret, received)) for secret in (made["secret"], new)] == [1, 1]

    third = (await post.ask("POST", path, json={"overlap_s": 60})).json()["secret"]
    await post.deliver(made)
    assert [len(signatures(each, post.receiver.received[1])) for each in (made["secret"], new, third)] == [0, 1, 1]

    newest = (await post.ask("POST", path, json={"overlap_s": 0})).json()["secret"]
    await post.deliver(made)
    assert [len(signatures(secret, post.receiver.received[2])) for secret in (new, third, newest)] == [0, 0, 1]

    await post.end_a_job()
    await post.publisher.publish()
    async with contextlib.aclosing(Sender(post.engine, Signer("another installation"), LOOPBACK, RULES)) as stranger:
        await stranger.send(made["id"])
    assert len(post.receiver.received) == 3
    error = (await post.show(made))["deliveries"][0]["error"]
    assert error == "the installation's secret was replaced: rotate the webhook's secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_what_a_name_leads_to_is_checked_when_it_is_connected_to(post: Post, host: str) -> None:
    """The webhook was made while the address was allowed; now nothing but public addresses is."""
    made = await post.create(url=post.receiver.url.replace("127.0.0.1", host))
    await post.end_a_job()
    await post.publisher.publish()
    async with contextlib.aclosing(Sender(post.engine, Signer(TOKEN), AddressRules([]), RULES)) as strict:
        await strict.send(made["id"])

    assert post.receiver.received == []
    error = (await post.show(made))["deliveries"][0]["error"]
    assert error == "must be https; the operator allows other networks by ADMISSION_WEBHOOK_NETWORKS"


async def test_the_scheme_of_an_address_may_be_in_capitals(post: Post) -> None:
    made = await post.create(url=post.receiver.url.replace("http://", "HTTP://"))
    answer = await post.ask("POST", f"/v1/webhooks/{made['id']}/test")
    assert (answer.status_code, answer.json()["state"]) == (200, "delivered")
    await post.execute("DELETE FROM webhooks WHERE id = $1", made["id"])


async def test_a_ping_says_at_once_what_became_of_it(post: Post) -> None:
    made = await post.create()
    post.receiver.answers = [(401, {})]
    path = f"/v1/webhooks/{made['id']}/test"
    refused, accepted = [(await post.ask("POST", path)).json() for _ in range(2)]
    assert (refused["state"], refused["error"], refused["event"]) == ("failed", "answered 401", "ping")
    assert (accepted["state"], accepted["status"]) == ("delivered", 204)
    assert post.receiver.received[0].message["data"] == {"webhook_id": made["id"]}
    await post.execute("DELETE FROM webhooks WHERE id = $1", made["id"])


async def test_a_webhook_that_is_deleted_while_it_is_tried_is_not_found(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, send = await post.create(), Sender.send_once

    async def late(sender: Sender, *given: Any) -> None:
        await post.execute("DELETE FROM webhooks WHERE id = $1", made["id"])
        await send(sender, *given)

    monkeypatch.setattr(Sender, "send_once", late)
    answer = await post.ask("POST", f"/v1/webhooks/{made['id']}/test")
    assert (answer.status_code, answer.json()["detail"]) == (404, "There is no such webhook.")


async def test_an_exceeded_budget_is_sent_once_a_month(post: Post) -> None:
    made = await post.create(events=["budget.exceeded"], project="vision")
    for project in ("vision", "speech"):
        spec = {"tenant_id": post.tenant, "project": project, "quantity": "kwh", "amount": 0, "action": "warn"}
        assert (await post.admission.ask("PUT", "/v1/budgets", role="admin", json=spec)).status_code == 200
    await Budgets(post.engine, lambda: None).count()
    await post.publisher.publish()
    await post.sender.send(made["id"])

    (received,) = post.receiver.received
    data = received.message["data"]
    assert received.message["type"] == "budget.exceeded"
    assert (data["project"], data["amount"], data["month"]) == ("vision", 0, f"{datetime.now(UTC):%Y-%m}")
    assert await post.admission.count("webhook_events") == 0
    await Budgets(post.engine, lambda: None, now=lambda: datetime(2099, 1, 1, tzinfo=UTC)).count()
    await post.publisher.publish()
    await post.sender.send(made["id"])
    assert post.receiver.received[1].message["data"]["month"] == "2099-01"


async def test_an_event_that_a_later_release_wrote_is_sent_whatever_was_before_it(post: Post) -> None:
    made = await post.create(events=["budget.exceeded"])
    await post.execute("INSERT INTO webhook_events (type, tenant_id, data) VALUES ('node.lost', $1, '{}')", post.tenant)
    ends = await post.create(events=["job.ended"])
    mad, sound = await post.end_a_job(), await post.end_a_job()
    await post.execute("UPDATE jobs SET state = 'of_another_release' WHERE id = $1", mad)
    data = {"budget_id": "b", "tenant_id": post.tenant, "project": "p", "quantity": "kwh", "amount": 1, "used": 2}
    data |= {"month": "2026-11", "action": "warn", "detail": "d", "of_a_later_release": True}
    await post.execute(
        "INSERT INTO webhook_events (type, tenant_id, project, data) VALUES ('budget.exceeded', $1, 'p', $2)",
        post.tenant,
        json.dumps(data),
    )
    await post.publisher.publish()
    await post.sender.send(made["id"])
    (received,) = post.receiver.received
    assert received.message["data"]["used"] == 2
    query = "SELECT body::jsonb #>> '{data,job_id}' FROM webhook_deliveries WHERE webhook_id = $1"
    assert [row[0] for row in await post.admission.database.fetch(query, ends["id"])] == [sound]


async def test_a_lost_node_is_sent_to_operators_with_the_jobs_it_ran(post: Post, database_url: str) -> None:
    made = await post.create(role="operator", events=["node.lost", "job.ended"])
    await post.admission.add_node("node-of-webhooks", "A100", "A100")
    job_id = await post.admission.submit(tenant=post.tenant)
    allocation = await post.admission.start(job_id, node="node-of-webhooks")
    for device in (0, 1):
        await post.execute(
            "INSERT INTO device_claims (node_id, device, allocation_id) VALUES ('node-of-webhooks', $1, $2)",
            device,
            allocation,
        )
    database = await Database.open(database_url, size=1)
    async with database.transaction() as connection:
        await gangs.lose_nodes(connection, ["node-of-webhooks"])
    await database.close()
    await post.publisher.publish()
    await post.sender.send(made["id"])

    (received,) = post.receiver.received
    data = received.message["data"]
    assert (received.message["type"], data["node_id"], data["zone"]) == ("node.lost", "node-of-webhooks", "DE")
    assert (data["gpus"], data["job_ids"]) == (2, [job_id])
    answer = await post.ask("DELETE", f"/v1/webhooks/{made['id']}")
    assert answer.status_code == 403
    assert answer.json()["detail"] == "Only an operator may change a webhook with node.lost."


async def test_a_webhook_belongs_to_its_tenant(post: Post) -> None:
    made = await post.create()
    path = f"/v1/webhooks/{made['id']}"
    assert [
        (await post.ask(method, path + suffix, tenant="default", json=body)).status_code
        for method, suffix, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("PATCH", "", {"enabled": False}),
            ("POST", "/test", None),
            ("POST", "/rotate", {}),
        )
    ] == [404] * 5
    listed = (await post.ask("GET", "/v1/webhooks", role="read_only")).json()["items"]
    assert [webhook["id"] for webhook in listed] == [made["id"]]
    assert "secret" not in listed[0]
    assert (await post.ask("DELETE", path, role="read_only")).status_code == 403
    assert (await post.ask("DELETE", path)).status_code == 204
    assert (await post.ask("GET", path)).status_code == 404


@pytest.mark.parametrize(
    ("spec", "status", "pointer"),
    [
        ({"url": "ftp://example.org"}, 422, "/url"),
        ({"url": "https://user:word@example.org/"}, 422, "/url"),
        ({"url": "https://10.0.0.1/"}, 422, "/url"),
        ({"url": "https://[::1]/"}, 422, "/url"),
        ({"url": "http://1.1.1.1/"}, 422, "/url"),
        ({"url": "https://no-such-host.invalid/"}, 422, "/url"),
        ({"url": "http://127.0.0.1/", "events": []}, 422, "/events"),
        ({"url": "http://127.0.0.1/", "events": ["job.began"]}, 422, "/events/0"),
        ({"url": "http://127.0.0.1/", "events": ["node.lost"]}, 403, None),
    ],
)
async def test_a_wrong_webhook_is_refused_by_the_field(
    post: Post, spec: dict[str, Any], status: int, pointer: str | None
) -> None:
    answer = await post.ask("POST", "/v1/webhooks", json={"events": ["job.ended"], **spec})
    assert answer.status_code == status, answer.text
    assert [error["pointer"] for error in answer.json().get("errors", [])] == ([pointer] if pointer else [])
    assert await post.admission.count("webhooks", f"tenant_id = '{post.tenant}'") == 0


async def test_a_tenant_may_have_so_many(post: Post) -> None:
    for _ in range(20):
        await post.create()
    answer = await post.ask("POST", "/v1/webhooks", json={"url": post.receiver.url, "events": ["job.ended"]})
    assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded")
