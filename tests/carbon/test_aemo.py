"""Australia's regions by unit: files of five minutes, files of files for days before, and what is neither.

The tables have the shape of NEMweb's own: C, I and D rows, times at the end of intervals, in the market's time.
"""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from datetime import UTC, datetime

import httpx
import pytest

from carbon_service.providers.aemo import ARCHIVE, CURRENT, ENTRY, FACTORS, intensities, units_of
from carbon_service.providers.protocol import DAY_S, ProviderError
from services.core.domain.carbon import Signal
from tests.carbon.upstream import Answer, Upstream, Watch, built

DIRECT = Signal.AVERAGE_DIRECT
UNITS = b"""C,SETP.WORLD,CO2EII_AVAILABLE_GENERATORS_WEB,AEMO,PUBLIC,2026/08/07,09:48:17,0000000531409885
I,CO2EII,PUBLISHING,1,STATIONNAME,DUID,GENSETID,REGIONID,CO2E_EMISSIONS_FACTOR,CO2E_ENERGY_SOURCE,CO2E_DATA_SOURCE
D,CO2EII,PUBLISHING,1,"Coal, Units 1-4",COAL1,COAL1,NSW1,0.90000000,"Black coal",ISP2024
D,CO2EII,PUBLISHING,1,Sun,SUN1,SUN1,NSW1,0.00000000,Solar,ISP2024
D,CO2EII,PUBLISHING,1,Water,WATER1,WATER1,TAS1,0.00000000,Water,ISP2024
D,CO2EII,PUBLISHING,1,Store,STORE1,STORE1,NSW1,0.00000000,"Battery Storage",ISP2024
D,CO2EII,PUBLISHING,1,Odd,ODD1,ODD1,NSW1,many,Wind,ISP2024
D,CO2EII,PUBLISHING,1,None,,NONE1,NSW1,0.1,Wind,ISP2024
C,"END OF REPORT",9
"""


def a_table(ends: str, **power_mw: object) -> bytes:
    """Return a table of what units generate in the interval that ends then."""
    rows = [f'D,DISPATCH,UNIT_SCADA,1,"{ends}",{unit},{mw},"{ends}"' for unit, mw in power_mw.items()]
    head = "I,DISPATCH,UNIT_SCADA,1,SETTLEMENTDATE,DUID,SCADAVALUE,LASTCHANGED"
    return "\r\n".join(["C,NEMP.WORLD,DISPATCHSCADA,AEMO", head, *rows, 'C,"END OF REPORT",4', ""]).encode()


def zipped(**files: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, inner in files.items():
            archive.writestr(name.replace("__", "."), inner)
    return content.getvalue()


def a_file(ends: str, **power_mw: object) -> bytes:
    return zipped(PUBLIC_DISPATCHSCADA__CSV=a_table(ends, **power_mw))


def test_an_interval_is_the_mean_of_the_factors_of_what_generates_in_a_region() -> None:
    power = {"COAL1": 300, "SUN1": "100.0", "WATER1": 7, "STORE1": 500, "ODD1": 9, "NEW1": 80}
    found = intensities(a_file("2026/05/15 00:05:00", **power), units_of(UNITS))
    start_s = datetime(2026, 5, 14, 14, 0, tzinfo=UTC).timestamp()  # ten hours behind, and at its beginning
    assert found == {"NSW1": [(start_s, pytest.approx(675.0))], "TAS1": [(start_s, 0.0)]}
    assert intensities(a_file("2026/05/15 00:05:00", COAL1=-3, SUN1="", WATER1="NaN"), units_of(UNITS)) == {}
    assert intensities(a_file("today", COAL1=3), units_of(UNITS)) == {}


async def test_days_before_come_from_the_archive_and_each_file_is_fetched_once_for_all_regions(
    http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    names = ["PUBLIC_DISPATCHSCADA_202605150005_0000000528917241.zip"]
    names.append("PUBLIC_DISPATCHSCADA_202605150010_0000000528917299.zip")
    page = "".join(f'<A HREF="/REPORTS/CURRENT/Dispatch_SCADA/{each}">{each}</A><br>' for each in names)
    upstream.answer(CURRENT, Answer(raw=page.encode()))
    upstream.answer(FACTORS, Answer(raw=UNITS))
    for name, at, coal in zip(names, ("05", "10"), (100, 200), strict=True):
        upstream.answer(CURRENT + name, Answer(raw=a_file(f"2026/05/15 00:{at}:00", COAL1=coal, SUN1=100, WATER1=1)))
    day = zipped(
        A__zip=a_file("2026/05/14 23:55:00", COAL1=1, WATER1=1), B__zip=a_file("2026/05/15 00:00:00", SUN1=1, WATER1=1)
    )
    upstream.answer(f"{ARCHIVE}PUBLIC_DISPATCHSCADA_20260514.zip", Answer(raw=day))
    now_s = datetime(2026, 5, 14, 14, 12, tzinfo=UTC).timestamp()
    aemo = built(ENTRY, http, lambda: now_s, watch.pacing(), url=upstream.url)
    found = await aemo.history("AU-NSW", DIRECT, now_s - 2 * DAY_S, now_s)
    assert [round(point.gco2_per_kwh) for point in found.points] == [900, 0, 450, 600]
    assert [point.start_s - now_s for point in found.points] == [-1320.0, -1020.0, -720.0, -420.0]
    assert [point.gco2_per_kwh for point in (await aemo.history("AU-TAS", DIRECT, now_s - DAY_S, now_s)).points] == [
        0
    ] * 4
    asked = [path for path in upstream.paths() if upstream.answers.get(path)]
    assert len(asked) == len(set(asked)) == 5
    assert [point.gco2_per_kwh for point in (await aemo.latest("AU-NSW", DIRECT)).points] == [pytest.approx(600.0)]
    assert aemo.feed("AU-WA") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04", zipped(A__zip=b"PK"), zipped(A__CSV=b"\xff\xfe\x00")])
async def test_what_is_no_file_of_values_is_one_error(
    content: bytes, http: httpx.AsyncClient, upstream: Upstream, watch: Watch
) -> None:
    name = "PUBLIC_DISPATCHSCADA_202605150005_0000000528917241.zip"
    upstream.answer(CURRENT, Answer(raw=name.encode()))
    upstream.answer(FACTORS, Answer(raw=UNITS))
    upstream.answer(CURRENT + name, Answer(raw=content))
    now_s = datetime(2026, 5, 14, 14, 6, tzinfo=UTC).timestamp()
    aemo = built(ENTRY, http, lambda: now_s, watch.pacing(), url=upstream.url)
    with pytest.raises(ProviderError, match="the answer is no"):
        await aemo.latest("AU-NSW", DIRECT)
    upstream.answer(FACTORS, Answer(raw=content))
    watch.now_s += 2 * DAY_S
    with pytest.raises(ProviderError, match="the answer"):
        await aemo.latest("AU-NSW", DIRECT)


def test_whatever_is_damaged_on_the_way_is_refused_or_read() -> None:
    whole, units = a_file("2026/05/15 00:05:00", COAL1=300, SUN1=100), units_of(UNITS)
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        with suppress(ValueError):  # the one error that is said to be raised
            assert set(intensities(damaged, units)) <= {"NSW1"}


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zipped(A__CSV=b"0" * 210_000_000)
    assert len(bomb) < 1_000_000
    with pytest.raises(ValueError, match="too large"):
        intensities(bomb, units_of(UNITS))
