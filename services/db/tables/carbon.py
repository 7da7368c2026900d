"""Tables of the carbon service: measured intensities, forecasts, and the state of a replay, prices."""

from sqlalchemy import Boolean, Column, Float, Numeric, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata

carbon_points = Table(
    "carbon_points",
    metadata,
    Column("zone", Text, primary_key=True),
    Column("signal", Text, primary_key=True),
    Column("provider", Text, primary_key=True),
    Column("start_at", Timestamp, primary_key=True),
    Column("end_at", Timestamp, nullable=False),
    Column("gco2_per_kwh", Float, nullable=False),
    Column("is_estimated", Boolean, nullable=False),
    Column("fetched_at", Timestamp, nullable=False),
)
"""One measured interval each. A provider's values are kept under its name: two providers' methods are not comparable,
so that a zone which changes its provider starts a new history."""

carbon_forecasts = Table(
    "carbon_forecasts",
    metadata,
    Column("zone", Text, primary_key=True),
    Column("signal", Text, primary_key=True),
    Column("provider", Text, primary_key=True),
    Column("generated_at", Timestamp, primary_key=True),
    Column("fetched_at", Timestamp, nullable=False),
    Column("points", JSONB, nullable=False),
)
"""Every forecast as issued, ``points`` = ``[[start, end, gCO2/kWh]]`` in UTC seconds: what was known when."""

carbon_learned_forecasts = Table(
    "carbon_learned_forecasts",
    metadata,
    Column("zone", Text, primary_key=True),
    Column("signal", Text, primary_key=True),
    Column("provider", Text, primary_key=True),
    Column("generated_at", Timestamp, primary_key=True),
    Column("method", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("points", JSONB, nullable=False),
    Column("backtest", JSONB),
)
"""The forecast learned from a provider's history, ``points`` = ``[[start, end, gCO2/kWh, p10, p90]]`` in UTC seconds;
none if persistence is used, because of the backtest or for lack of history."""

carbon_replays = Table(
    "carbon_replays",
    metadata,
    Column("name", Text, primary_key=True),
    Column("real_at", Timestamp, nullable=False),
    Column("grid_at", Timestamp, nullable=False),
    Column("speed", Float, nullable=False),
    Column("requested_start_at", Timestamp),
)
"""The state of a replay of recordings: at ``real_at`` the grid's clock showed ``grid_at`` and ran at ``speed``."""

carbon_prices = Table(
    "carbon_prices",
    metadata,
    Column("start_at", Timestamp, primary_key=True),
    Column("zone", Text, primary_key=True),
    Column("currency", Text, nullable=False),
    Column("per_kwh", Numeric, nullable=False),
    Column("demand_per_kw_month", Numeric, nullable=False),
    Column("fetched_at", Timestamp, nullable=False),
)
"""What electricity costs in one hour of UTC, and the demand charge in force then. Hours that have ended stay as they
are, whatever the tariff becomes."""
