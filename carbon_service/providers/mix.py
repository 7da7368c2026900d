"""Carbon intensity from what generates: the shared part of providers that publish megawatts by source.

Direct and life-cycle emissions are the medians of IPCC AR5, Working Group III, Annex III, table A.III.2 (2014), but:
oil, which is not in it (direct: 77.4 kg/GJ of the 2006 IPCC Guidelines at an efficiency of 36 %; life cycle: IPCC SRREN
2011, Annex II, table A.II.4); lignite and peat, which are its coal by the carbon of their energy (101 and 106 against
94.6 kg/GJ there). Biomass counts as 0 directly. Power from stores was counted when it was generated, and is left out;
so is what no factor is known for, and an interval with more than ``MOST_UNKNOWN`` of it is marked as estimated.

Where the source has flows, it is the intensity of what is used in the zone: what flows in adds the mix of the neighbour
that it comes from in that hour, as if all that a zone generates and takes in left it evenly mixed. What flows through a
neighbour from farther away counts as the neighbour's own; the mix of one that is not known is unknown.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from carbon_service.providers.entry import L, LiveProvider, ProviderContext
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import DAY_S, Feed, ProviderError, Reading, Series, series
from services.core.domain.carbon import Signal

FACTORS: dict[str, tuple[float, float]] = {
    "coal": (760.0, 820.0),
    "lignite": (811.0, 876.0),
    "peat": (852.0, 919.0),
    "gas": (370.0, 490.0),
    "oil": (774.0, 840.0),
    "biomass": (0.0, 230.0),
    "geothermal": (0.0, 38.0),
    "hydro": (0.0, 24.0),
    "nuclear": (0.0, 12.0),
    "solar": (0.0, 48.0),
    "wind": (0.0, 11.0),
    "wind at sea": (0.0, 12.0),
    "waves": (0.0, 17.0),
}
"""Direct and life-cycle gCO2/kWh by source."""
STORED = "stored"
UNKNOWN = "unknown"
MOST_UNKNOWN = 0.1  #: Share of generation
LEAST_MISSED = 0.05
"""The share from which a source that reported just before and is missing now shows that an interval is incomplete."""
SIGNALS = (Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE)


@dataclass(frozen=True)
class Mix:
    """What generated over one interval."""

    start_s: float | None  #: When it begins, UTC seconds; None where the answer's instant cannot be read
    power_mw: Mapping[str, float]  #: Mean power by source: a key of ``FACTORS``, ``STORED`` or ``UNKNOWN``
    is_doubted: bool = False  #: Whether the source's own figures contradict one another
    imported_mw: Mapping[str, float] = field(default_factory=dict[str, float])  #: What flowed in, by source likewise

    @property
    def used_mw(self) -> Mapping[str, float]:
        """What was generated and what flowed in; what a source consumes, such as a store, counts as none."""
        generated = ((source, max(0.0, mw)) for source, mw in self.power_mw.items())
        return dict(Counter(dict(generated)) + Counter(self.imported_mw)) if self.imported_mw else self.power_mw


def intensity(power_mw: Mapping[str, float], signal: Signal) -> tuple[float | None, bool]:
    """Return the gCO2/kWh of a mix and whether too much of it is unknown; None where nothing known generates.

    Negative power is consumption and counts as none.
    """
    at = SIGNALS.index(signal)
    known = {source: max(0.0, mw) for source, mw in power_mw.items() if source in FACTORS}
    total = sum(known.values())
    if total <= 0 or not math.isfinite(total):
        return None, True
    unknown = max(0.0, power_mw.get(UNKNOWN, 0.0))
    return sum(mw / total * FACTORS[source][at] for source, mw in known.items()), unknown > MOST_UNKNOWN * total


def series_of(mixes: Iterable[Mix], signal: Signal, step_s: float) -> Series:
    """Return the intensities of mixes; those that lack a source which had just had its share are rejected."""
    readings: list[Reading] = []
    for mix, is_whole in _in_turn(mixes):
        value, is_estimated = intensity(mix.used_mw, signal)
        readings.append((mix.start_s, value if is_whole else None, is_estimated or mix.is_doubted))
    return series(readings, step_s)


def _in_turn(mixes: Iterable[Mix]) -> Iterator[tuple[Mix, bool]]:
    """Yield mixes in chronological order, and whether each has all sources that had just had their share."""
    before: Mapping[str, float] = {}
    for mix in sorted(mixes, key=lambda each: -math.inf if each.start_s is None else each.start_s):
        total = sum(max(0.0, mw) for mw in before.values())
        is_whole = all(source in mix.power_mw for source, mw in before.items() if mw > LEAST_MISSED * total)
        before = mix.power_mw if is_whole else before
        yield mix, is_whole


def _of_import(mw: float, mix: Mix | None) -> dict[str, float]:
    """Return by source what flows in from a neighbour with that mix; power from its stores is of its other sources."""
    theirs = {} if mix is None else mix.power_mw
    shares = {source: max(0.0, each) for source, each in theirs.items() if source != STORED}
    total = sum(shares.values())
    return {source: mw * each / total for source, each in shares.items()} if total > 0 else {UNKNOWN: mw}


class MixProvider(LiveProvider[L]):
    """A provider of average intensities by a zone's mix; the subclass fetches mixes."""

    signals = SIGNALS
    recent_s = DAY_S

    def __init__(self, feed: Feed, settings: L, context: ProviderContext, limit: RateLimit) -> None:
        super().__init__(settings, context, limit)
        self._feed = feed

    def area(self, zone: str) -> str | None:
        """Return the provider's name of a zone; None for one that it does not have."""
        raise NotImplementedError

    def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        """Yield the mixes of intervals that begin in the range, and perhaps of some beside it."""
        raise NotImplementedError

    def feed(self, zone: str) -> Feed | None:
        area = self.area(zone)
        return None if area is None else replace(self._feed, zone_name=area)

    async def inflows(self, area: str, start_s: float, end_s: float) -> Mapping[str, Mapping[float, float]]:
        """Return what flows in from each neighbouring area, MW by the beginnings of steps; none if it is not known."""
        return {}

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the intervals that begin in the range and have ended; shorter steps become the mean of theirs."""
        area = self.area(zone) or ""
        found = await self._by_step(area, start_s, end_s)
        try:
            inflows = await self.inflows(area, start_s, end_s) if found else {}
        except ProviderError:  # what is marked as estimated is asked for again for a while, and then replaced
            inflows, found = {}, {at: replace(mix, is_doubted=True) for at, mix in found.items()}
        for neighbour, flows in inflows.items():
            try:
                theirs = await self._by_step(neighbour, start_s, end_s) if any(flows.values()) else {}
            except ProviderError:
                theirs = {}
            known = {mix.start_s: mix for mix, is_whole in _in_turn(theirs.values()) if is_whole}
            for at, mw in flows.items():
                if mw > 0 and (mix := found.get(at)):
                    more = Counter(mix.imported_mw) + Counter(_of_import(mw, known.get(at)))
                    found[at] = replace(mix, imported_mw=more)
        return series_of(found.values(), signal, self._feed.step_s)

    async def _by_step(self, area: str, start_s: float, end_s: float) -> dict[float | None, Mix]:
        """Return an area's mixes over the range by the beginnings of steps that have ended."""
        step_s, last_s = self._feed.step_s, min(end_s, self._now_s() + 1e-6)
        found: dict[float | None, list[Mix]] = {}
        async for mix in self.mixes(area, start_s, end_s):
            begins_s = None if mix.start_s is None else mix.start_s - mix.start_s % step_s
            if begins_s is None or start_s <= begins_s <= last_s - step_s:
                found.setdefault(begins_s, []).append(mix)
        return {begins_s: _mean(begins_s, each) for begins_s, each in found.items()}


def _mean(start_s: float | None, mixes: Sequence[Mix]) -> Mix:
    sources = {source for mix in mixes for source in mix.power_mw}
    power_mw = {source: fmean(mix.power_mw[source] for mix in mixes if source in mix.power_mw) for source in sources}
    return Mix(start_s, power_mw, any(mix.is_doubted for mix in mixes))
