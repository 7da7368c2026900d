"""Which migration each release has last, and what rows may hold that an earlier release refuses to read.

Since 0.2, releases leave out fields of stored documents that they do not know (``Message.as_stored``), so that only
0.1.0 needs its list here.
"""

from __future__ import annotations

RELEASES = {"0.1.0": "0060"}
"""The newest migration of each release, which is added here when the release is made."""

NOT_READ: dict[str, tuple[tuple[str, str, str], ...]] = {
    "0.1.0": (
        ("tenants", "limits", "flex"),
        *((table, "spec", field) for table in ("jobs", "job_arrays") for field in ("flex", "notify", "cells")),
        ("pools", "spec", "accuracy_gco2_per_kwh"),
        ("pools", "spec", "modes.*.accuracy_pct"),
        ("pools", "spec", "regions.*.least_accuracy_pct"),
        ("pools", "spec", "places.*.cluster"),
        ("pools", "spec", "modes.*.workload"),
        ("pool_plans", "problem", "spec.places.*.cluster"),
        ("pool_plans", "problem", "spec.modes.*.workload"),
        ("pool_plans", "problem", "spec.accuracy_gco2_per_kwh"),
        ("pool_plans", "problem", "spec.modes.*.accuracy_pct"),
        ("pool_plans", "problem", "spec.regions.*.least_accuracy_pct"),
        ("pool_plans", "result", "forecasts.ordered"),
        ("solves", "problem", "modes.*.accuracy_pct"),
        ("solves", "problem", "regions.*.least_accuracy_pct"),
        ("model_endpoints", "spec", "accuracy_pct"),
        ("simulations", "problem", "orders"),
    )
}
"""Fields of stored documents, as table, column and path, that make a release fail when it reads the row."""

ROLES_NOT_KNOWN = {"0.1.0": ("grid",)}
"""Roles of keys that a release has not: going back revokes such keys and leaves them as those of users."""


VALUES_NOT_KNOWN = {
    "0.1.0": tuple((table, "trigger", "grid_order", "intensity") for table in ("pool_plans", "fleet_plans"))
}
"""Values that a release has not, as table, column and value, and what takes their place."""


def holds(column: str, path: str, *, is_set: bool = False) -> str:
    """Return SQL for whether a document has a field there; with ``is_set``, one that is not null."""
    steps = path.replace(".*", "[*]")
    return f"{column} @? '$.{steps}{' ? (@ != null)' if is_set else ''}'"


def without(document: str, path: str) -> str:
    """Return SQL for a document, an expression of jsonb, without the field at a path; ``*`` is each item of a list."""
    head, _, rest = path.partition(".")
    if not rest:
        return f"({document} - '{head}')"
    inner = f"({document} -> '{head}')"
    if rest.startswith("*."):
        items = f"jsonb_array_elements({inner}) WITH ORDINALITY AS found (item, place)"
        value = f"(SELECT coalesce(jsonb_agg({without('item', rest[2:])} ORDER BY place), '[]') FROM {items})"
    else:
        value = without(inner, rest)
    return f"jsonb_set({document}, '{{{head}}}', {value})"
