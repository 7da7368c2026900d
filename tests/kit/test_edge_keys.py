"""Keys: cached for a moment, asked for once, trusted a little longer while admission does not answer."""

import asyncio
import hashlib
from datetime import UTC, datetime

import pytest

from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit.edge.keys import MOST_REQUESTS, KeyCache
from services.kit.problems import ProblemError, unavailable

GOOD, BAD = "ws_" + "a" * 43, "ws_" + "b" * 43
GOOD_SHA256 = hashlib.sha256(GOOD.encode()).hexdigest()


class Admission:
    """Knows one key, counts questions, and may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.is_revoked = False
        self.questions = 0
        self.expires_at: datetime | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.now_s = 1_000.0
        self.cache = KeyCache(self.resolve, max_age_s=3, grace_s=60, size=2, clock_s=lambda: self.now_s)

    async def resolve(self, key_sha256: str) -> ResolvedKey | None:
        """Answer as admission does."""
        self.questions += 1
        await self.may_answer.wait()
        if self.is_away:
            raise unavailable("Admission")
        if self.is_revoked or key_sha256 != GOOD_SHA256:
            return None
        identity = Identity(tenant_id="t", role=Role.USER, key_id="key_1")
        return ResolvedKey(identity=identity, limits=TenantLimits(), expires_at=self.expires_at)

    async def status(self, secret: str = GOOD) -> int:
        """Return 200, or the status of the refusal."""
        try:
            await self.cache.caller(f"Bearer {secret}".encode(), {})
        except ProblemError as error:
            return error.status
        return 200


@pytest.fixture
def admission() -> Admission:
    return Admission()


async def test_an_answer_is_used_for_its_time(admission: Admission) -> None:
    for secret, expected in ((GOOD, 200), (BAD, 401)):
        admission.questions = 0
        assert [await admission.status(secret) for _ in range(5)] == [expected] * 5
        assert admission.questions == 1
    admission.now_s += 3.1
    assert await admission.status() == 200
    assert admission.questions == 2


async def test_a_revoked_key_ends_within_that_time(admission: Admission) -> None:
    assert await admission.status() == 200
    admission.is_revoked = True
    admission.now_s += 2.9
    assert await admission.status() == 200
    admission.now_s += 0.2
    assert await admission.status() == 401


async def test_an_expired_key_ends_on_time_even_while_admission_is_away(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission.expires_at = datetime(2026, 3, 1, tzinfo=UTC)
    monkeypatch.setattr("services.kit.edge.keys.utc_now", lambda: datetime(2026, 2, 28, tzinfo=UTC))
    assert await admission.status() == 200
    admission.is_away = True
    monkeypatch.setattr("services.kit.edge.keys.utc_now", lambda: datetime(2026, 3, 1, tzinfo=UTC))
    assert await admission.status() == 401


async def test_a_thousand_at_once_ask_once(admission: Admission) -> None:
    admission.may_answer.clear()
    waiting = [asyncio.create_task(admission.status()) for _ in range(1_000)]
    await asyncio.wait(waiting, timeout=0.05)
    waiting[0].cancel()  # the one who asked gives up; the others still get their answer
    admission.may_answer.set()
    assert set(await asyncio.gather(*waiting[1:])) == {200}
    assert admission.questions == 1


async def test_a_known_key_has_a_grace(admission: Admission) -> None:
    assert await admission.status() == 200
    admission.is_away = True
    admission.now_s += 50
    assert await admission.status() == 200
    asked = admission.questions
    assert await admission.status() == 200
    assert admission.questions == asked  # not again at every request
    assert await admission.status(BAD) == 503
    admission.now_s += 20
    assert await admission.status() == 503
    admission.is_away = False
    assert await admission.status() == 200


async def test_a_key_known_to_be_bad_has_none(admission: Admission) -> None:
    assert await admission.status(BAD) == 401
    admission.is_away = True
    admission.now_s += 10
    assert await admission.status(BAD) == 503


async def test_keys_that_are_none_fill_no_memory(admission: Admission) -> None:
    for i in range(100):
        assert await admission.status(f"ws_{i:043}") == 401
    assert len(admission.cache._answers) == 2


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic eDp5",
        b"Bearer ws_short",
        b"Bearer " + b"x" * 10_000,
        b"\xff\xfe",
        b"ws_",
    ],
)
async def test_what_is_no_key_is_not_asked_for(admission: Admission, header: bytes | None) -> None:
    with pytest.raises(ProblemError) as caught:
        await admission.cache.caller(header, {})
    assert (caught.value.status, caught.value.headers) == (401, {"www-authenticate": "Bearer"})
    assert admission.questions == 0


async def test_the_scheme_is_read_in_any_case(admission: Admission) -> None:
    assert (await admission.cache.caller(b"bEARER  " + GOOD.encode(), {})).identity.tenant_id == "t"


async def test_a_flood_of_unknown_keys_is_bounded(admission: Admission) -> None:
    admission.may_answer.clear()
    flood = [asyncio.create_task(admission.status(f"ws_{i:043}")) for i in range(300)]
    await asyncio.wait(flood, timeout=0.05)
    assert admission.questions == MOST_REQUESTS
    admission.may_answer.set()
    assert sorted(await asyncio.gather(*flood)) == [401] * 100 + [503] * 200
