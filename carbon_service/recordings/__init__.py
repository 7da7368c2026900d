"""Real grids of 2021, one file per zone: ``{zone}.csv.gz`` with ``time,intensity,forecast``; NOTICE names the sources.

``time`` (UTC) begins an interval that lasts until the next row's, ``intensity`` is the measured average direct
intensity and ``forecast`` the day-ahead forecast of it, both in gCO2/kWh; an empty field means that there was none.
"""
