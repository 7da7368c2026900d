"""Tables have owners, and processes meet in named views: no SQL reaches into a neighbour's tables, or past a tenant."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping

import pytest

from tests.architecture.tables import locked_views, named_tables, process_of, statements_in, tables_in, without_tenant
from tests.architecture.test_imports import ROOT, modules
from tests.support.schema import DESCRIBED, TABLES, VIEWED

OWNED = tomllib.loads((ROOT / "services/db/tables/owners.toml").read_text(encoding="utf-8"))
OWNERS: Mapping[str, list[str]] = OWNED["tables"]
VIEWS: Mapping[str, str] = OWNED["views"]
LISTED = tomllib.loads((ROOT / "tests/architecture/tables.toml").read_text(encoding="utf-8"))
IMPORTED = "from services.db.tables import jobs\n\n"
NAMES_TABLES = re.compile(r"\b(?:FROM|JOIN|UPDATE|INTO|USING)\b|services\.db\.tables")
MOST_NEIGHBOURS = 43
"""How many times SQL names a neighbour's table, at most: what is listed may only become less."""


def listed(kind: str) -> list[str]:
    return [place for group in LISTED[kind] for place in group["places"]]


@functools.cache
def sources() -> dict[str, str]:
    """Return the modules of processes that can name a table, with their sources."""
    texts = {module: path.read_text(encoding="utf-8") for module, path in modules() if process_of(module) is not None}
    return {module: text for module, text in texts.items() if NAMES_TABLES.search(text)}


def neighbours_in(source: str, module: str) -> list[str]:
    """Return each place that names a table of another process, and the table."""
    process = process_of(module)
    named = named_tables(source, module, set(OWNERS))
    return [f"{place}: {table}" for place in named for table in sorted(named[place]) if process not in OWNERS[table]]


def of_tenants() -> set[str]:
    """Return the tables and views that say of which tenant a row is."""
    described = re.findall(r"^CREATE TABLE (\w+) \((.*?)^\);", DESCRIBED, re.MULTILINE | re.DOTALL)
    views = re.findall(r"^CREATE VIEW (\w+) AS(.*?);", VIEWED, re.MULTILINE | re.DOTALL)
    return {name for name, columns in described if re.search(r"^\s+tenant_id ", columns, re.MULTILINE)} | {
        name for name, query in views if "tenant_id" in query
    }


def test_every_table_and_view_has_an_owner() -> None:
    assert {*OWNERS} == TABLES
    assert {
        name: owner
        for owner, name in re.findall(r"^-- (\w+): .*\n(?:--.*\n)*CREATE VIEW (\w+) AS", VIEWED, re.MULTILINE)
    } == VIEWS
    assert {owner for owners in (*OWNERS.values(), VIEWS.values()) for owner in owners} <= {
        *(process_of(module) for module in sources()),
        "migrations",
    }


def test_no_process_reaches_into_a_neighbours_tables() -> None:
    found = [line for module, source in sources().items() for line in neighbours_in(source, module)]

    assert sorted(set(found) - set(listed("neighbours"))) == [], "name a view of services/db/tables/owners.toml instead"
    assert sorted(set(listed("neighbours")) - set(found)) == [], "is gone: take it off tables.toml"


def test_what_is_listed_becomes_less() -> None:
    assert len(listed("neighbours")) == len(set(listed("neighbours"))) <= MOST_NEIGHBOURS


def test_queries_on_rows_of_tenants_name_the_tenant() -> None:
    scopes = set(LISTED["scopes"])
    found = {
        place for module, source in sources().items() for place in without_tenant(source, module, of_tenants(), scopes)
    }
    covered = {place: {each for each in found if covers(place, each)} for place in listed("tenants")}

    assert sorted(found - {each for places in covered.values() for each in places}) == [], "asks for no tenant"
    assert [place for place, places in covered.items() if not places] == [], "asks for its tenant, or is no more"


def covers(listed: str, place: str) -> bool:
    return place == listed or (listed.endswith(".*") and place.startswith(listed[:-1]))


def test_nobody_locks_or_writes_rows_through_a_view() -> None:
    for module, source in sources().items():
        for each in statements_in(source, module):
            assert locked_views(each.text, set(VIEWS)) == [], each.place
            written = re.findall(r"\b(?:UPDATE|INTO|DELETE\s+FROM)\s+(\w+)", each.text)
            assert not set(written) & set(VIEWS), each.place


def test_every_list_says_why() -> None:
    assert all(len(group["reason"].split()) > 3 for kind in ("neighbours", "tenants") for group in LISTED[kind])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("SELECT id FROM nodes n LEFT JOIN node_power p ON true", {"nodes", "node_power"}),
        ("SELECT count(*) AS jobs FROM plans WHERE jobs > 0", {"plans"}),
        ("UPDATE ONLY jobs SET state = 'x' FROM ending e", {"jobs", "ending"}),
        ("DELETE FROM claims c USING allocations a WHERE a.id = c.id", {"claims", "allocations"}),
        ("SELECT 1 FROM allocations a, nodes n WHERE true", {"allocations", "nodes"}),
        (
            "WITH lost AS (SELECT id FROM nodes), others AS (SELECT 1) SELECT 1 FROM lost JOIN others USING (id)",
            {"nodes"},
        ),
        ("SELECT extract(epoch FROM now()), a IS DISTINCT FROM known.b FROM jsonb_each(c)", set()),
        ("SELECT 1 -- FROM jobs\nFROM users", {"users"}),
        ("from the nodes of a job", set()),
    ],
)
def test_tables_of_a_text_are_found(text: str, names: set[str]) -> None:
    assert tables_in(text) == names


@pytest.mark.parametrize(
    "source",
    [
        'NODES = "SELECT id FROM nodes"',
        'NODES = f"SELECT id FROM {TABLE}"\nTABLE = "nodes"',
        'def f():\n    return f"SELECT id FROM {table}"\nOF = ("nodes", "jobs")',
        "class A:\n    def f(self):\n        return text('SELECT 1 FROM jobs JOIN nodes USING (id)')",
        "from services.db.tables import nodes\n\ndef f():\n    return select(nodes.c.id)",
        "from services.db.tables import nodes as known\nALL = select(known)",
        'LOCK = "SELECT 1 FROM jobs, nodes FOR UPDATE"',
    ],
)
def test_a_neighbours_table_is_seen(source: str) -> None:
    assert [line.split(": ")[1] for line in neighbours_in(source, "services.scheduler.repository.jobs")] == ["nodes"]
    assert neighbours_in(source.replace("jobs", "engines"), "services.telemetry.worker.repository.x") == []


@pytest.mark.parametrize(
    "source",
    [
        '"""SELECT 1 FROM nodes"""',
        'STATE = {"nodes": 1}',
        'COUNT = "SELECT count(*) AS nodes FROM plans"',
        'A = "nodes"',
    ],
)
def test_other_uses_of_a_name_are_no_tables(source: str) -> None:
    assert neighbours_in(source, "services.scheduler.repository.jobs") == []


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ('Q = "SELECT name FROM jobs WHERE id = $1"', True),
        ('Q = "SELECT tenant_id FROM jobs WHERE id = $1"', True),
        ('Q = "SELECT name FROM jobs WHERE id = $1 AND tenant_id = $2"', False),
        ('Q = f"SELECT name FROM jobs WHERE {OWN}"\nOWN = "j.tenant_id = $3"', False),
        ('Q = "INSERT INTO jobs (id, tenant_id) VALUES ($1, $2)"', False),
        ('Q = "SELECT id FROM nodes"', False),
        (IMPORTED + "def f(): return select(jobs.c.id)", True),
        (IMPORTED + "def f(t): return select(jobs).where(jobs.c.tenant_id == t)", False),
        (IMPORTED + "def f(caller): return visible(select(jobs), caller)", False),
        (IMPORTED + "def f(**values): return insert(jobs).values(values)", False),
    ],
)  # fmt: skip
def test_a_query_that_names_no_tenant_is_seen(source: str, is_seen: bool) -> None:
    assert bool(without_tenant(source, "services.admission.repository.x", {"jobs"}, {"visible"})) == is_seen


@pytest.mark.parametrize(
    ("text", "views"),
    [
        ("SELECT 1 FROM jobs j JOIN usable n ON true FOR UPDATE OF j", []),
        ("SELECT 1 FROM jobs j JOIN usable n ON true FOR SHARE OF n", ["usable"]),
        ("SELECT 1 FROM usable FOR UPDATE", ["usable"]),
        ("SELECT 1 FROM usable n WHERE id = $1", []),
    ],
)
def test_a_lock_through_a_view_is_seen(text: str, views: list[str]) -> None:
    assert locked_views(text, {"usable"}) == views
