"""Whatever a provider of grid data answers, it becomes finite values at sane times, or one clear error."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import orjson
import pytest

from carbon_service.providers.protocol import Point, Provider, ProviderError
from carbon_service.providers.registry import PROVIDERS
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

NOW_S = 1_760_000_000.0
FIRST_S, LAST_S = -62_135_596_800.0, 253_402_300_800.0
"""The years 1 to 9999."""
VALUES: tuple[Any, ...] = (
    *(None, "NaN", "Infinity", "-Infinity", -1e308, 1e308, 10**400, -1, 0, True, [], {}, "", "x" * 10_000, "0x1"),
)
TIMES: tuple[Any, ...] = (
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2025-02-30T00:00:00Z", "2099-01-01T00:00:00Z"),
    *("", None, 0, -1, 10**30, [], {}, "now", "2025-10-09T08:53", "2025-W41-4", "１９９９-01-01T00:00:00Z"),
)
BODIES = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"1",
    b"NaN",
    b'{"data": NaN}',
    b"[" * 5_000,
    b"\xff\xfe",
    b'{"data": {}}',
)
GOOD_TIME = "2025-10-09T08:00:00Z"


def a_row(time: Any, value: Any) -> dict[str, Any]:
    """Return one row that has the fields of all providers."""
    fields = ("carbonIntensity", "value", "marginal_co2_avg_lb_mwh", "marginal_co2_rate", "forecast", "actual")
    fields = (*fields, "CO2Emission", "charbon", "taux_co2")
    times = ("datetime", "from", "to", "point_time", "datetime_beginning_utc", "datetime_beginning_ept", "generated_at")
    times = (*times, "period", "Minutes5UTC", "date_heure")
    nested = {"forecast": value, "actual": value, "index": "low"}
    rest = {"intensity": nested, "zone": "Z", "isEstimated": value, "fueltype": "COL", "gaz": 1}
    return dict.fromkeys(fields, value) | dict.fromkeys(times, time) | rest


def a_body(zone: str, *rows: Any) -> dict[str, Any]:
    lists = {name: list(rows) for name in ("data", "history", "forecast", "items", "records")}
    meta = {"region": zone, "units": "lbs_co2_per_mwh", "generated_at": GOOD_TIME, "signal_type": "co2_moer"}
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    lists["response"] = {"data": list(rows)}  # type: ignore[assignment]
    return {**first, **lists, "zone": zone, "meta": meta, "token": "t", "updatedAt": GOOD_TIME, "totalRows": len(rows)}


class Hostile(Upstream):
    """Answers everything the same."""

    content = b""

    async def handle(self, request: Any) -> Any:
        self.answers = {request.path: [Answer(raw=b'{"token": "t"}' if request.path == "/login" else self.content)]}
        return await super().handle(request)


@pytest.fixture
def providers(http: httpx.AsyncClient, upstream: Upstream, watch: Watch) -> dict[str, tuple[Provider, str]]:
    """Each provider, and a zone of it."""
    upstream.__class__ = Hostile

    def new(name: str, **settings: str) -> Provider:
        return built(PROVIDERS[name], http, lambda: NOW_S, watch.pacing(), url=upstream.url, **settings)

    return {
        "uk": (new("uk"), "GB"),
        "maps": (new("electricity_maps", token="t"), "DE"),
        "watttime": (new("watttime", username="u", password="p"), "US-CAL-CISO"),
        "pjm": (new("pjm", key="k"), "US-MIDA-PJM"),
        "eia": (new("eia", key="k"), "US-MIDA-PJM"),
        "eco2mix": (new("eco2mix"), "FR"),
        "energinet": (new("energinet"), "DK-DK1"),
    }


def contents(zone: str) -> list[bytes]:
    """Return the bodies to try: broken ones, and right ones with one value that is not."""
    odd = [a_row(GOOD_TIME, value) for value in VALUES] + [a_row(time, 100) for time in TIMES]
    wrapped: list[Any] = [*odd, None, [], "x", 1]
    bodies = [a_body(zone, a_row(GOOD_TIME, 100), row) for row in wrapped] + [a_body(zone, row) for row in wrapped]
    bodies += [[a_row(GOOD_TIME, 100), row] for row in wrapped]
    bodies += [a_body("ELSEWHERE", a_row(GOOD_TIME, 100)), a_body(zone, *odd)]
    return [*BODIES, *(_json(body) for body in bodies)]


def _json(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()  # whole numbers beyond 64 bits


def assert_sane(points: tuple[Point, ...]) -> None:
    for point in points:
        assert math.isfinite(point.gco2_per_kwh)
        assert FIRST_S <= point.start_s < point.end_s <= LAST_S + 86_400


@pytest.mark.parametrize("name", ["uk", "maps", "watttime", "pjm", "eia", "eco2mix", "energinet"])
async def test_hostile_answers_become_sane_points_or_one_error(
    providers: dict[str, tuple[Provider, str]], upstream: Upstream, watch: Watch, name: str
) -> None:
    provider, zone = providers[name]
    assert isinstance(upstream, Hostile)
    refused = 0
    for content in contents(zone):
        upstream.content = content
        watch.now_s += 600.0  # past what is cached
        for signal in Signal:
            if signal not in provider.signals:
                continue
            try:
                assert_sane((await provider.latest(zone, signal)).points)
                assert_sane((await provider.history(zone, signal, NOW_S - 7_200, NOW_S)).points)
                for issue in await provider.forecast(zone, signal, 86_400):
                    assert math.isfinite(issue.generated_s)
                    assert_sane(issue.points)
            except ProviderError:
                refused += 1
    assert refused >= len(BODIES) / 2
