"""The client of every live provider, against a server that misbehaves."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from carbon_service.providers.http import ProviderClient, RateLimit
from carbon_service.providers.protocol import ProviderError
from tests.carbon.upstream import Answer, Upstream, Watch


def a_client(http: httpx.AsyncClient, upstream: Upstream, watch: Watch, **changes) -> ProviderClient:
    limit = changes.pop("limit", RateLimit(1000, 1.0))
    return ProviderClient(http, upstream.url, watch.pacing(**changes), limit, {"auth-token": "secret"})


@pytest.mark.parametrize(
    "trouble",
    [Answer(status=500), Answer(status=503), Answer(status=429), Answer(raw=b"{half"), Answer(raw=b"")],
    ids=["500", "503", "429", "cut off", "empty"],
)
async def test_trouble_that_passes_is_waited_out(http, upstream: Upstream, watch: Watch, trouble: Answer) -> None:
    upstream.answer("/x", trouble, trouble, {"ok": True})
    assert await a_client(http, upstream, watch).get("/x") == {"ok": True}
    first_s, second_s = watch.waits_s
    assert 0.25 <= first_s <= 0.5 <= second_s <= 1.0


async def test_trouble_that_stays_is_told_after_the_last_attempt(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", Answer(status=502))
    with pytest.raises(ProviderError, match="answered 502") as caught:
        await a_client(http, upstream, watch).get("/x")
    assert len(upstream.asked) == 4
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_refusal_is_not_asked_again(http, upstream: Upstream, watch: Watch, status: int) -> None:
    upstream.answer("/x", Answer(status=status))
    with pytest.raises(ProviderError) as caught:
        await a_client(http, upstream, watch).get("/x")
    assert caught.value.status == status
    assert len(upstream.asked) == 1


async def test_a_server_that_hangs_times_out(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", Answer(hangs=True), {"ok": True})
    assert await a_client(http, upstream, watch, timeout_s=0.05).get("/x") == {"ok": True}


async def test_a_server_that_is_not_there_is_an_error_of_the_provider(http, watch: Watch) -> None:
    client = ProviderClient(http, "http://127.0.0.1:1", watch.pacing(attempts=2), RateLimit(10, 1.0))
    with pytest.raises(ProviderError, match="ConnectError"):
        await client.get("/x")


async def test_retry_after_is_honoured_in_seconds(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", Answer(status=429, headers={"Retry-After": "7"}), {"ok": True})
    await a_client(http, upstream, watch).get("/x")
    assert watch.waits_s == [7.0]


async def test_retry_after_is_honoured_as_a_date(http, upstream: Upstream, watch: Watch) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    upstream.answer("/x", Answer(status=503, headers={"Retry-After": soon}), {"ok": True})
    await a_client(http, upstream, watch).get("/x")
    assert 17 < watch.waits_s[0] <= 20


async def test_nonsense_in_retry_after_is_passed_over(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", Answer(status=429, headers={"Retry-After": "soon"}), {"ok": True})
    await a_client(http, upstream, watch).get("/x")
    assert watch.waits_s[0] <= 0.5


async def test_a_provider_that_wants_long_peace_is_left_alone(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", Answer(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(ProviderError) as caught:
        await a_client(http, upstream, watch).get("/x")
    assert caught.value.retry_after_s == 3600
    assert watch.waits_s == []
    assert len(upstream.asked) == 1


async def test_no_window_holds_more_requests_than_the_limit(http, upstream: Upstream, watch: Watch) -> None:
    sent_s: list[float] = []
    upstream.answer("/x", {})
    client = a_client(http, upstream, watch, limit=RateLimit(3, 10.0))
    for _ in range(8):
        await client.get("/x")
        sent_s.append(watch.now_s)
        watch.now_s += 1.0
    assert all(later - earlier >= 10.0 for earlier, later in zip(sent_s, sent_s[3:], strict=False))
    assert sent_s[:3] == [1000.0, 1001.0, 1002.0]


async def test_a_fresh_answer_is_used_again_and_an_old_one_is_not(http, upstream: Upstream, watch: Watch) -> None:
    upstream.answer("/x", {"turn": 1}, {"turn": 2})
    client = a_client(http, upstream, watch)
    turns = []
    for _ in range(3):
        turns.append((await client.get("/x", {"a": 1}, cache_s=60))["turn"])
        watch.now_s += 40
    assert turns == [1, 1, 2]
