"""Files of a network's levels: Slurm's and plain ones say the same, and a malformed one says what is wrong with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.domain.errors import DomainError
from services.core.domain.topology import hosts, read_topology

PLAIN = """
rack r1: node-[01-02]   # two of them
rack r2: node-03,node-04
block a: r1, r2
rack r3: node-05
bandwidth rack 400
"""
SLURM = """
SwitchName=a Switches=r[1-2]
SwitchName=r1 Nodes=node-[01-02] LinkSpeed=100
SwitchName=r2 \\
    Nodes=node-03,node-04
switchname=r3 nodes=node-05
"""
NODES = [f"node-0{at}" for at in range(1, 7)]


def groups(text: str, labels: dict[str, dict[str, str]] | None = None) -> dict[str, list[list[str]]]:
    """Return the nodes of each domain, by level."""
    levels, domains = read_topology(text).of([(node, (labels or {}).get(node, {})) for node in NODES])
    found: dict[str, list[list[str]]] = {}
    for at, level in enumerate(levels):
        together: dict[str, list[str]] = {}
        for node, of in zip(NODES, domains, strict=True):
            together.setdefault(of[at], []).append(node[-1])
        found[level] = [*together.values()]
    return found


def test_both_forms_say_the_same_and_what_has_no_domain_is_one_of_its_own() -> None:
    racks = [["1", "2"], ["3", "4"], ["5"], ["6"]]
    expected = {"node": [[each] for each in "123456"], "rack": racks, "block": [["1", "2", "3", "4"], ["5"], ["6"]]}

    assert groups(PLAIN) == expected
    assert groups(SLURM) == expected
    assert read_topology(PLAIN).gbps == {"rack": 400.0}


def test_labels_say_where_nodes_are_that_no_file_names() -> None:
    labels = {"node-01": {"rack": "x", "block": "a"}, "node-06": {"rack": "r1", "block": "a"}}

    assert groups(PLAIN, labels)["rack"] == [["1", "2", "6"], ["3", "4"], ["5"]]
    assert [*groups("", {})] == ["node"]
    assert groups("", labels | {"node-02": {"rack": "x", "block": "b"}})["rack"][:2] == [["1"], ["2"]]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rack r1: a\nrack r1: b", "line 2: r1 is there twice"),
        ("rack r1: a\n\nrack r2: a", "a is in r1 and in r2, both rack"),
        ("foo", "line 1: neither"),
        ("rack r1:", "line 1: no list of names"),
        ("rack r1: a[1-", "line 1: no list of names"),
        ("rack r1: a[9-1]", "line 1: no range"),
        ("rack r1: a[1-99999999]", "line 1: no range"),
        ("rack r1: a\nblock b: r1, zz", "line 2: zz is no domain"),
        ("rack r1: a\nrack r2: r1", "a is in r1 and in r2, both rack"),
        ("rack r1: a\nblock x: r1\nblock y: r1", "r1 is in x and in y"),
        ("rack r1: a,b\nblock x: a", "some nodes of r1"),
        ("bandwidth rack 400", "no level rack"),
        ("rack r1: a\nbandwidth rack much", "line 2: much is no number"),
        ("node n: a", "none of them called node"),
        ("SwitchName=s Switches=s", "below itself"),
        ("SwitchName=s Switches=t", "there is no switch t"),
        ("SwitchName=s", "line 1: no SwitchName or BlockName with Nodes or Switches"),
        ("Nodes=a", "line 1: no SwitchName"),
        ("rack <b>: a", "line 1: <b> is no name of a domain"),
    ],
)
def test_a_malformed_file_has_one_error_that_says_where(text: str, why: str) -> None:
    with pytest.raises(DomainError, match=why.replace("(", r"\(")):
        read_topology(text)


@given(st.text("SwitchName=Nodes[]-,09 :ra\n\\#", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        levels, domains = read_topology(text).of([("a", {}), ("r0", {"rack": "a"})])
    except DomainError:
        return
    assert all(len(each) == len(levels) for each in domains)


def test_lists_of_hosts_are_those_of_slurm() -> None:
    assert hosts("a, b[1-3,07-09]c,d") == ["a", "b1c", "b2c", "b3c", "b07c", "b08c", "b09c", "d"]
