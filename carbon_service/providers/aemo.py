"""Australia's National Electricity Market by five minutes: AEMO's open files at NEMweb; no key is needed.

What each unit generates (``Dispatch_SCADA``: a file each five minutes for two days, one a day for a year before) times
the emission factor that AEMO states for it (``CO2EII_AVAILABLE_GENERATORS``, t/MWh sent out), over all units of a
region. Batteries are left out; panels on roofs, and units without a factor, are not in it, and nor are imports.
"""

import asyncio
import csv
import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone

from carbon_service.providers.entry import LiveProvider, LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import DAY_S, Feed, ProviderError, Reading, Series, number, series
from services.core.domain.carbon import Signal

BASE_URL = "https://nemweb.com.au"
CURRENT, ARCHIVE = "/Reports/Current/Dispatch_SCADA/", "/Reports/Archive/Dispatch_SCADA/"
FACTORS = "/Reports/Current/CDEII/CO2EII_AVAILABLE_GENERATORS.CSV"
NAMED = re.compile(r"(PUBLIC_DISPATCHSCADA_(\d{12})_\d+\.zip)", re.IGNORECASE)
REGIONS = {"AU-NSW": "NSW1", "AU-QLD": "QLD1", "AU-SA": "SA1", "AU-TAS": "TAS1", "AU-VIC": "VIC1"}
EASTERN = timezone(timedelta(hours=10))  #: The market's time, in summer, too
STEP_S = 300.0
LONGEST_BYTES = 200_000_000
KEPT_FILES = 2_000  #: What was read of them: two days of five minutes, and days before

Units = dict[str, tuple[str, float]]
Generated = dict[str, list[tuple[float, float]]]


class AemoSettings(LiveSettings):
    """Prefix ``CARBON_AEMO_``."""

    url: str = BASE_URL


class Aemo(LiveProvider[AemoSettings]):
    """The five regions of the market; a file is of all of them, and is fetched once."""

    name = "aemo"

    def __init__(self, settings: AemoSettings, context: ProviderContext) -> None:
        super().__init__(settings, context, RateLimit(300, 60.0))
        self._read: dict[str, Generated] = {}
        self._turn = asyncio.Lock()

    def feed(self, zone: str) -> Feed | None:
        if zone not in REGIONS:
            return None
        return Feed(
            zone_name=REGIONS[zone],
            attribution="AEMO, NEMweb: unit SCADA and the factors of its Carbon Dioxide Equivalent Intensity Index",
            step_s=STEP_S,
            max_age_s=1800.0,
            poll_interval_s=300.0,
            history_s=14 * DAY_S,
        )

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the intervals that begin in the range; a day that is no longer there is a gap."""
        listing = NAMED.findall(await self._client.get(CURRENT, cache_s=60.0, read=bytes.decode))
        current = {_instant_s(ends, "%Y%m%d%H%M"): CURRENT + name for name, ends in listing}
        day_s, paths = start_s - (start_s + 10 * 3600.0) % DAY_S, list[str]()
        while current and day_s < min(end_s, min(current) - STEP_S):
            paths.append(f"{ARCHIVE}PUBLIC_DISPATCHSCADA_{datetime.fromtimestamp(day_s, EASTERN):%Y%m%d}.zip")
            day_s += DAY_S
        paths += [path for ends_s, path in current.items() if start_s < ends_s <= end_s + STEP_S]
        readings: list[Reading] = []
        for path in paths:
            found = (await self._generated(path)).get(REGIONS[zone], [])
            readings += [(at_s, value, False) for at_s, value in found if start_s <= at_s < end_s]
        return series(readings, STEP_S)

    async def _generated(self, path: str) -> Generated:
        """Return the intensities in one file, by region."""
        async with self._turn:
            if path not in self._read:
                try:
                    content = await self._client.get(path, read=bytes)
                except ProviderError as error:
                    if error.status == 404 and path.startswith(ARCHIVE):
                        return {}
                    raise
                units = await self._client.get(FACTORS, cache_s=DAY_S, read=units_of)
                try:
                    self._read[path] = await asyncio.to_thread(intensities, content, units)
                except ValueError as error:
                    raise ProviderError(f"{path}: {error}") from error
                for old in list(self._read)[:-KEPT_FILES]:
                    del self._read[old]
            return self._read[path]


def units_of(content: bytes) -> Units:
    """Return the region and gCO2/kWh of each unit that generates, by its DUID; ``ValueError`` for another table."""
    units: Units = {}
    for row in _rows([content], "CO2EII", "PUBLISHING"):
        factor, source = number(row.get("CO2E_EMISSIONS_FACTOR")), row.get("CO2E_ENERGY_SOURCE", "").lower()
        if row.get("DUID") and factor is not None and factor >= 0 and not ("batter" in source or "storage" in source):
            units[row["DUID"]] = row.get("REGIONID", ""), 1_000.0 * factor
    if not units:
        raise ValueError("the answer has no emission factors")
    return units


def intensities(content: bytes, units: Units) -> Generated:
    """Return the beginnings of intervals, UTC seconds, and their gCO2/kWh by region, of a file of SCADA values.

    Raises:
        ValueError: It is no such file, or one of a file of files.
    """
    sums: dict[tuple[str, float], tuple[float, float]] = {}
    for row in _rows(_unpacked(content), "DISPATCH", "UNIT_SCADA"):
        region, factor = units.get(row.get("DUID", ""), ("", 0.0))
        power_mw, ends_s = number(row.get("SCADAVALUE")), _instant_s(row.get("SETTLEMENTDATE", ""), "%Y/%m/%d %H:%M:%S")
        if region and power_mw is not None and power_mw > 0 and ends_s > 0:
            emitted, generated = sums.get((region, ends_s), (0.0, 0.0))
            sums[region, ends_s] = emitted + power_mw * factor, generated + power_mw
    found: Generated = {}
    for (region, ends_s), (emitted, generated) in sorted(sums.items()):
        found.setdefault(region, []).append((ends_s - STEP_S, emitted / generated))
    return found


def _instant_s(written: str, form: str) -> float:
    """Return UTC seconds of the market's time; 0 for what is no time."""
    try:
        return datetime.strptime(written, form).replace(tzinfo=EASTERN).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _unpacked(content: bytes, left: int = LONGEST_BYTES, depth: int = 2) -> Iterator[bytes]:
    """Yield the tables in an archive, those in archives within it, too; raise ``ValueError`` if it is none, or huge."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                left -= entry.file_size
                if left < 0:
                    raise ValueError("the archive is too large")
                inner = archive.read(entry)
                if entry.filename.lower().endswith(".zip") and depth > 1:
                    yield from _unpacked(inner, LONGEST_BYTES // 100, depth - 1)
                else:
                    yield inner
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError("the answer is no zip archive") from error


def _rows(tables: Iterable[bytes], *named: str) -> Iterator[dict[str, str]]:
    """Yield the data rows of the tables of a name: an I row has their columns, a D row the values."""
    for content in tables:
        columns: list[str] = []
        try:
            for row in csv.reader(io.StringIO(content.decode("utf-8-sig"))):
                if tuple(row[1:3]) == named and row[0] == "I":
                    columns = row
                elif tuple(row[1:3]) == named and row[0] == "D":
                    yield dict(zip(columns[4:], row[4:], strict=False))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError("the answer is no table") from error


ENTRY = ProviderEntry("aemo", AemoSettings, Aemo)
