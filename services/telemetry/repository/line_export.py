"""The ledger's lines as text, formatted by PostgreSQL and passed on as it comes: nothing is held here."""

from typing import Any, Literal

from services.db.database import Database
from services.telemetry.repository.lines import FIGURES_OF_DAYS, FIGURES_OF_LINES
from services.telemetry.repository.reports import OWNED, PERIOD, Subject
from services.telemetry.repository.seal_export import Output, Written, write_seals
from services.telemetry.repository.seals import Sign

LONGEST_S = 3_600.0
"""A client that takes longer to read an export gets no more of it: its snapshot keeps rows from being removed."""

# What strangers wrote is neither a formula to a spreadsheet nor a command to a terminal, as in `services.kit.text`.
_VISIBLE = r"""CASE WHEN {text} ~ '^[0-9A-Za-z][ -~]*$' THEN {text} ELSE '''' || regexp_replace({text},
    '[\u0001-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]', '?', 'g') END"""

_TIME = "to_json({at}) #>> ARRAY[]::text[]"
"""Faster than `to_char`, and in CSV as in JSON."""

OWNER = f"""
    LEFT JOIN LATERAL (
        SELECT i.tenant_id, i.project, {_VISIBLE.format(text="i.user_name")} AS user_name
        FROM reported_jobs i WHERE i.id = l.job_id OFFSET 0
    ) j ON true
    LEFT JOIN LATERAL (
        SELECT {_VISIBLE.format(text="min(d ->> 'model')")} AS name
        FROM nodes n CROSS JOIN jsonb_array_elements(n.devices) d
        WHERE n.id = l.node_id HAVING count(DISTINCT d ->> 'model') = 1
    ) model ON true
"""

_FLAG = "::text /* and not t or f, in CSV */"

_COLUMNS = f"""
    {_TIME.format(at="l.start_at")} AS start_at, {_TIME.format(at="l.end_at")} AS end_at, l.node_id,
    {_VISIBLE.format(text="l.boot_id")} AS boot_id, l.sequence, l.owner AS allocation_id, l.job_id,
    j.tenant_id AS tenant, j.project, j.user_name AS "user", model.name AS model, l.devices, l.gpus, l.gpu_s,
    l.energy_j, l.gpu_energy_j, l.cpu_energy_j, l.static_energy_j, l.source AS gpu_source, l.cpu_source,
    l.basis, l.reported_energy_j, l.estimated_energy_j, l.zone, l.signal, l.provider,
    {_TIME.format(at="l.fetched_at")} AS fetched_at, l.intensity_kind, l.intensity_gco2_per_kwh, l.pue,
    l.facility_energy_j, l.carbon_gco2, l.estimated_gco2, l.release,
    l.intensity_estimated{_FLAG} AS intensity_estimated, l.estimated{_FLAG} AS estimated, l.batch, l.sum_number
"""
"""In the order of `contracts.reports.LedgerLine`."""

_OF_RAW = """,
            boot_id, sequence, array_to_string(devices, ' ') AS devices, gpus, cpu_energy_j, static_energy_j, source,
            cpu_source, basis, reported_energy_j, provider, fetched_at, intensity_kind, release,
            intensity_estimated, batch, NULL::bigint AS sum_number"""

_OF_DAYS = """
    NULL AS boot_id, NULL::bigint AS sequence, NULL AS devices, NULL::int AS gpus, NULL::float8 AS cpu_energy_j,
    NULL::float8 AS static_energy_j, NULL AS source, NULL AS cpu_source, NULL AS basis,
    NULL::float8 AS reported_energy_j, NULL AS provider,
    NULL::timestamptz AS fetched_at, NULL AS intensity_kind, NULL AS release, NULL::bool AS intensity_estimated,
    NULL::bigint AS batch
"""

_LINES = f"""
SELECT {_COLUMNS} FROM ({{lines}}) l {OWNER}
WHERE {PERIOD} AND {OWNED} AND ($5::text IS NULL OR l.job_id = $5) ORDER BY l.start_at, l.node_id, {{order}}
"""

_EXPORTS = (
    _LINES.format(
        lines=f"SELECT *, {_OF_DAYS} FROM ({FIGURES_OF_DAYS.format(more=', sum_number')}) d",
        order="l.owner, l.zone, l.signal, l.pue, l.sum_number",
    ),
    _LINES.format(
        lines=FIGURES_OF_LINES.format(raw="energy_usages", more=_OF_RAW), order="l.boot_id, l.sequence, l.owner"
    ),
)
"""Daily sums of old lines, then the raw lines."""

# The rows come in the order of an index, so that the first are sent at once and no more than those of one instant are
# sorted at a time; owners and boards are looked up once each, and kept.
_IN_ORDER = "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_sort = off"

_ANY_ORDER = _IN_ORDER.replace("= off", "= on")


async def write_lines(
    database: Database,
    about: Subject,
    form: Literal["csv", "jsonl"],
    output: Output,
    sign: Sign | None = None,
    job_id: str | None = None,
) -> None:
    """Write the lines that begin in a period, or one job's, as of one instant, in order of time and in pieces.

    PostgreSQL goes no faster than ``output`` takes them. With ``sign``, what proves that nothing was changed follows.
    """
    written = Written(output, form)
    async with database.transaction("repeatable_read", readonly=True) as connection:
        if job_id is None:  # those of one job are few, and found by its index
            await connection.execute(_IN_ORDER)
        for number, query in enumerate(_EXPORTS):
            if form == "csv":
                options: dict[str, Any] = {"header": number == 0}
            else:  # JSON has neither of these characters, so that CSV quotes nothing
                query, options = (
                    f"SELECT row_to_json(r) FROM ({query.replace(_FLAG, '')}) r",
                    {"delimiter": "\x02", "quote": "\x01"},
                )
            await connection.copy_from_query(
                query,
                *about,
                job_id,
                output=written.take if sign else output,
                format="csv",
                timeout=LONGEST_S,
                **options,
            )
        if sign is not None:
            await connection.execute(_ANY_ORDER)
            await write_seals(connection, about, written, OWNER, sign)
