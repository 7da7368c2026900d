"""Money and grams together: with ``tonne_price`` every hour counts by what a kWh costs, its carbon included.

    cost(t) = max(0, price(t) + tonne_price * c(t) / 10^6)

What is paid for drawing power does not make it worth wasting, so that no hour costs less than nothing. The policy reads
costs, in money per kWh, where it reads intensities otherwise; it decides by ratios between hours and grids, so that the
unit does not matter. Where the price of any grid is not known, carbon alone counts in all.
"""

import math

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve, CarbonOutlook
from services.core.domain.prices import PriceCurve
from services.core.domain.units import S_PER_HOUR

G_PER_TONNE = 1e6


def counted(snapshot: Snapshot, tonne_price: float | None) -> Snapshot:
    """Return the snapshot with costs as its outlooks; as it is without a price of carbon or prices of electricity."""
    known = [(outlook, outlook.prices) for outlook in snapshot.outlooks if outlook.prices is not None]
    if tonne_price is None or len(known) < len(snapshot.outlooks):
        return snapshot
    return snapshot.again(outlooks=tuple(_counted(outlook, prices, tonne_price) for outlook, prices in known))


def _counted(outlook: CarbonOutlook, prices: PriceCurve, tonne_price: float) -> CarbonOutlook:
    curve = outlook.curve
    first, last = (math.ceil(time_s / S_PER_HOUR) * S_PER_HOUR for time_s in (curve.start_s, curve.end_s))
    hours = np.arange(first, last, S_PER_HOUR)
    times: Floats = np.unique(np.concatenate((curve.times_s, hours)))
    step, price = np.searchsorted(curve.times_s, times, side="right") - 1, prices.at(times)

    def cost(gco2_per_kwh: Floats) -> Floats:
        costs = gco2_per_kwh[step]
        costs *= tonne_price / G_PER_TONNE
        costs += price
        costs[costs < 0] = 0.0
        return costs

    middle = CarbonCurve(times, cost(curve.intensity_gco2_per_kwh), curve.end_s, curve.estimated[step])
    low, high = (None if each is None else cost(each) for each in (outlook.low, outlook.high))
    return CarbonOutlook(outlook.zone, outlook.signal, middle, outlook.stale, low, high)
