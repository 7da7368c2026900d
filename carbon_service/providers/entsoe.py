"""Europe by ENTSO-E's Transparency Platform: actual generation per type (document A75), day-ahead forecasts of wind and
sun (A69), prices (A44) and flows (A11); a free token is needed.

The API answers in XML. A series is one source over one or more periods of equal steps; of a block of variable size
(curve A03) the positions that are left out repeat the one before.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from statistics import fmean
from typing import TypeVar
from xml.etree import ElementTree

from pydantic import SecretStr

from carbon_service.providers.entry import LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.mix import STORED, UNKNOWN, Mix, MixProvider
from carbon_service.providers.protocol import DAY_S, Feed, instant_s, number, written
from carbon_service.settings import Pairs
from services.contracts.schema import said

R = TypeVar("R")

BASE_URL = "https://web-api.tp.entsoe.eu"
RANGE_S, HOUR_S = 7 * DAY_S, 3600.0  #: One request covers a week: a series for each source, at most 100 in an answer
LONGEST_BYTES = 20_000_000
MINUTE = "%Y%m%d%H%M"
STEPS_S = {"PT15M": 900.0, "PT30M": 1800.0, "PT60M": HOUR_S}
SOURCES = {
    **{"B01": "biomass", "B02": "lignite", "B03": "gas", "B04": "gas", "B05": "coal", "B06": "oil", "B07": "lignite"},
    **{"B08": "peat", "B09": "geothermal", "B10": STORED, "B11": "hydro", "B12": "hydro", "B13": "waves"},
    **{"B14": "nuclear", "B16": "solar", "B18": "wind at sea", "B19": "wind", "B25": STORED},
}
"""By production type (PsrType). Gas from coal counts as gas and oil shale as lignite; waste (B17), other
renewables (B15) and others (B20) are unknown."""
AREAS = {
    **{"AT": "10YAT-APG------L", "BA": "10YBA-JPCC-----D", "BE": "10YBE----------2", "BG": "10YCA-BULGARIA-R"},
    **{"CH": "10YCH-SWISSGRIDZ", "CZ": "10YCZ-CEPS-----N", "DE": "10Y1001A1001A83F", "DK-DK1": "10YDK-1--------W"},
    **{"DK-DK2": "10YDK-2--------M", "EE": "10Y1001A1001A39I", "ES": "10YES-REE------0", "FI": "10YFI-1--------U"},
    **{"FR": "10YFR-RTE------C", "GR": "10YGR-HTSO-----Y", "HR": "10YHR-HEP------M", "HU": "10YHU-MAVIR----U"},
    **{"IE": "10Y1001A1001A59C", "IT": "10YIT-GRTN-----B", "LT": "10YLT-1001A0008Q", "LV": "10YLV-1001A00074"},
    **{"NL": "10YNL----------L", "NO-NO1": "10YNO-1--------2", "NO-NO2": "10YNO-2--------T"},
    **{"NO-NO3": "10YNO-3--------J", "NO-NO4": "10YNO-4--------9", "NO-NO5": "10Y1001A1001A48H"},
    **{"PL": "10YPL-AREA-----S", "PT": "10YPT-REN------W", "RO": "10YRO-TEL------P", "RS": "10YCS-SERBIATSOV"},
    **{"SE": "10YSE-1--------K", "SE-SE1": "10Y1001A1001A44P", "SE-SE2": "10Y1001A1001A45N"},
    **{"SE-SE3": "10Y1001A1001A46L", "SE-SE4": "10Y1001A1001A47J", "SI": "10YSI-ELES-----O", "SK": "10YSK-SEPS-----K"},
}
BORDERS = """
AT/CH AT/CZ AT/DE AT/HU AT/IT AT/SI BA/HR BA/RS BE/DE BE/FR BE/NL BG/GR BG/RO BG/RS CH/DE CH/FR CH/IT CZ/DE CZ/PL CZ/SK
DE/DK-DK1 DE/DK-DK2 DE/FR DE/NL DE/NO-NO2 DE/PL DE/SE-SE4 DK-DK1/DK-DK2 DK-DK1/NL DK-DK1/NO-NO2 DK-DK1/SE-SE3
DK-DK2/SE-SE4 EE/FI EE/LV ES/FR ES/PT FI/NO-NO4 FI/SE-SE1 FI/SE-SE3 FR/IT GR/IT HR/HU HR/RS HR/SI HU/RO HU/RS HU/SI
HU/SK IT/SI LT/LV LT/PL LT/SE-SE4 NL/NO-NO2 NO-NO1/NO-NO2 NO-NO1/NO-NO3 NO-NO1/NO-NO5 NO-NO1/SE-SE3 NO-NO2/NO-NO5
NO-NO3/NO-NO4 NO-NO3/NO-NO5 NO-NO3/SE-SE2 NO-NO4/SE-SE1 NO-NO4/SE-SE2 PL/SE-SE4 PL/SK RO/RS SE-SE1/SE-SE2 SE-SE2/SE-SE3
SE-SE3/SE-SE4
"""
"""Pairs of zones between which power flows; across other borders, and of all Sweden (``SE``), no flow is asked for."""
PRICE_AREAS = {
    "DE": "10Y1001A1001A82H",
    "IE": "10Y1001A1001A59C",
}  #: Bidding zones, by which prices, flows and forecasts are
PRICE = "{*}price.amount"
FEED = Feed(
    zone_name="",
    attribution="ENTSO-E Transparency Platform, generation per type and physical flows; factors of IPCC AR5",
    step_s=HOUR_S,
    max_age_s=6 * HOUR_S,
    poll_interval_s=900.0,
    history_s=90 * DAY_S,
    revision_s=DAY_S,
)


class EntsoeSettings(LiveSettings):
    """Prefix ``CARBON_ENTSOE_``."""

    url: str = BASE_URL
    token: SecretStr
    areas: Pairs = said("Areas of further zones by their energy identification code.", default={})


class Entsoe(MixProvider[EntsoeSettings]):
    """Zones by the energy identification code of their area."""

    name = "entsoe"

    def __init__(self, settings: EntsoeSettings, context: ProviderContext) -> None:
        super().__init__(FEED, settings, context, RateLimit(300, 60.0))
        self._token = settings.token.get_secret_value()
        self._areas = {**AREAS, **settings.areas}

    def area(self, zone: str) -> str | None:
        return self._areas.get(zone)

    async def prices(self, area: str, currency: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the day-ahead prices (document A44) of a zone, or of a bidding zone by its code.

        Raises:
            ProviderError: They are in another currency, or it is no such document.
        """
        zone = PRICE_AREAS.get(area) or self._areas.get(area, area)
        params = {"documentType": "A44", "in_Domain": zone, "out_Domain": zone}

        def read(content: bytes) -> list[tuple[str, float | None, float]]:
            return [step for each in series_in(content) if _is_price(each, currency) for step in _steps(each, PRICE)]

        found = await self._ask(params, start_s, end_s, read)
        return [(at_s, per_mwh / 1_000.0) for _, at_s, per_mwh in found if at_s is not None]

    async def expected(self, zone: str, start_s: float, end_s: float) -> dict[float, dict[str, float]]:
        """Return the day-ahead forecasts of wind and sun (document A69); an hour is the mean of its steps."""
        area, found = PRICE_AREAS.get(zone) or self._areas[zone], dict[float, dict[str, list[float]]]()
        for first_s, until_s in _weeks(start_s, end_s):
            params = {"documentType": "A69", "processType": "A01", "in_Domain": area}
            for psr, at_s, power_mw in await self._ask(params, first_s, until_s, generated):
                if at_s is not None and psr in SOURCES:
                    found.setdefault(at_s - at_s % HOUR_S, {}).setdefault(SOURCES[psr], []).append(power_mw)
        return {hour_s: {source: fmean(each) for source, each in mix.items()} for hour_s, mix in found.items()}

    async def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        """Yield the steps of the range; what a source consumes has no place in a mix."""
        for first_s, until_s in _weeks(start_s, end_s):
            params = {"documentType": "A75", "processType": "A16", "in_Domain": area}
            steps: dict[float | None, dict[str, float]] = {}
            for psr, at_s, power_mw in await self._ask(params, first_s, until_s, generated):
                mix, source = steps.setdefault(at_s, {}), SOURCES.get(psr, UNKNOWN)
                mix[source] = mix.get(source, 0.0) + power_mw
            for at_s, mix in steps.items():
                yield Mix(at_s, mix)

    async def inflows(self, area: str, start_s: float, end_s: float) -> dict[str, dict[float, float]]:
        """Return the physical flows (document A11) from the neighbours of a zone of ``AREAS``, as means of hours."""
        zone = next((each for each, code in AREAS.items() if code == area), "")
        pairs = (pair.split("/") for pair in BORDERS.split())
        flows: dict[str, dict[float, float]] = {}
        for other in (second if first == zone else first for first, second in pairs if zone in (first, second)):
            params = {"documentType": "A11", "in_Domain": PRICE_AREAS.get(zone, area)}
            params["out_Domain"] = PRICE_AREAS.get(other, AREAS[other])
            hours: dict[float, list[float]] = {}
            for first_s, until_s in _weeks(start_s, end_s):
                for _, at_s, mw in await self._ask(params, first_s, until_s, generated):
                    if at_s is not None:
                        hours.setdefault(at_s - at_s % HOUR_S, []).append(mw)
            flows[AREAS[other]] = {hour_s: fmean(each) for hour_s, each in hours.items()}
        return flows

    async def _ask(self, params: Mapping[str, str], start_s: float, end_s: float, read: Callable[[bytes], R]) -> R:
        period = {"periodStart": written(start_s, MINUTE), "periodEnd": written(end_s, MINUTE)}
        return await self._client.get(
            "/api", {"securityToken": self._token, **params, **period}, cache_s=60.0, read=read
        )


def _weeks(start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Yield the parts of a range that one request may ask for, from whole hour to whole hour."""
    first_s = start_s - start_s % HOUR_S
    while first_s < end_s:
        until_s = min(first_s + RANGE_S, end_s - end_s % -HOUR_S)
        yield first_s, until_s
        first_s = until_s


def _is_price(found: ElementTree.Element, currency: str) -> bool:
    """Whether a series is of the first auction of the day, the coupled one; one in another currency is refused."""
    sequence = found.findtext("{*}classificationSequence_AttributeInstanceComponent.position", "1")
    of = found.findtext("{*}currency_Unit.name", "")
    if of != currency:
        raise ValueError(f"its prices are in {of or 'no currency'}, not in {currency}")
    return sequence == "1"


def generated(content: bytes) -> list[tuple[str, float | None, float]]:
    """Return production type, beginning and megawatts of each step of an answer; none of one without data.

    Raises:
        ValueError: It is no such document.
    """
    return [step for each in series_in(content) for step in _steps(each, "{*}quantity")]


def series_in(content: bytes) -> list[ElementTree.Element]:
    """Return the series of an answer, none of one without data; raise ``ValueError`` if it is no such document."""
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content or len(content) > LONGEST_BYTES:
        raise ValueError("the answer is too long, or declares entities")
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise ValueError("the answer is not XML") from error
    if root.tag.rpartition("}")[2] == "Acknowledgement_MarketDocument":  # there is nothing for the range
        return []
    return root.findall("{*}TimeSeries")


def _steps(found: ElementTree.Element, amount: str) -> Iterator[tuple[str, float | None, float]]:
    if found.find("{*}outBiddingZone_Domain.mRID") is not None:  # what the source consumed
        return
    psr, curve = found.findtext("{*}MktPSRType/{*}psrType", ""), found.findtext("{*}curveType", "")
    for period in found.findall("{*}Period"):
        start_s, end_s = (instant_s(period.findtext(f"{{*}}timeInterval/{{*}}{name}")) for name in ("start", "end"))
        step_s = STEPS_S.get(period.findtext("{*}resolution", ""))
        if start_s is None or step_s is None:
            yield psr, None, 0.0
            continue
        read = ((number(at.findtext("{*}position")), number(at.findtext(amount))) for at in period.findall("{*}Point"))
        points = sorted((position, mw) for position, mw in read if position is not None and mw is not None)
        last = 1 + (end_s - start_s) / step_s if end_s is not None and curve == "A03" else 0.0
        followings = [*(position for position, _ in points), last][1:]
        for (position, mw), following in zip(points, followings, strict=True):
            held = int(min(following - position, 7 * 96)) if curve == "A03" else 1
            for step in range(max(1, held)):
                yield psr, start_s + (position - 1 + step) * step_s, mw


ENTRY = ProviderEntry("entsoe", EntsoeSettings, Entsoe)
