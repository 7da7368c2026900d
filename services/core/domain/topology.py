"""The levels of a cluster's network, and the domain of each node at each of them: as a file or nodes' labels say.

A file has one line for each domain, in either of two forms, and `#` begins a comment::

    rack r1: node-[01-08]                             SwitchName=leaf1 Nodes=node-[01-08]
    rack r2: node-[09-16]                             SwitchName=leaf2 Nodes=node-[09-16]
    block a: r1, r2                                   SwitchName=spine Switches=leaf[1-2]
    bandwidth rack 400

The first names each level, narrower ones first, and may state the bandwidth of a node's network to others in its domain
of a level, Gb/s. The second is Slurm's ``topology.conf``: switches with nodes are racks, those above them blocks, and
those above these are of the levels ``level3`` and so on; a ``BlockName`` line makes a block. Its other keys are not
read.

A node that the file does not name has the domains that its labels say, by the names of the levels; without a file, the
levels are those of ``LABELS`` that any node has a label of. Racks of one name in two blocks are two. What is in no
domain of a level, such as a rack in no block or a node in no rack, counts as a domain of its own there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from services.core.domain.errors import DomainError

NODE, CLUSTER = "node", "cluster"  #: The narrowest level of any cluster, and all nodes together
LABELS = ("nvlink", "rack", "block")  #: Names of levels that are known without a file, narrowest first
MOST_NODES = 200_000
MOST_LEVELS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_PLAIN = re.compile(r"(\S+)\s+(\S+?)\s*:\s*(.*)")
_BRACKETS = re.compile(r"([^\[\],\s]*)\[([0-9,-]+)\]([^\[\],\s]*)|([^\[\],\s]+)")

Place = tuple[str | None, ...]  #: The name of a node's domain at each level, narrowest first; None: it has none


@dataclass(frozen=True)
class Topology:
    """What a file says, or nothing."""

    levels: tuple[str, ...] = ()  #: Besides ``NODE``, narrowest first
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])  #: Of the nodes it names
    gbps: Mapping[str, float] = field(default_factory=dict[str, float])  #: By level, where it is stated

    def of(self, nodes: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return all levels of these nodes, given by id and labels, and the domain of each at each of them."""
        levels = self.levels or tuple(each for each in LABELS if any(each in labels for _, labels in nodes))
        domains: list[tuple[str, ...]] = []
        for node, labels in nodes:
            place = self.places.get(node) or tuple(labels.get(each) for each in levels)
            found = [f"node {node}"]
            for at, name in enumerate(place):
                found.append("/".join(each or "" for each in place[at:]) if name else found[-1])
            domains.append(tuple(found))
        return (NODE, *levels), domains

    def bytes_per_s(self, levels: Sequence[str], otherwise: float) -> tuple[float, ...]:
        """Return the bandwidth of a node's network within a domain of each of these levels; empty: none is stated."""
        return tuple(self.gbps.get(each, otherwise * 8e-9) * 1e9 / 8 for each in levels) if self.gbps else ()


@lru_cache(maxsize=8)
def read_topology(text: str) -> Topology:
    """Return what a file says; ``DomainError`` if it is malformed; the message names the line."""
    reading = _Reading()
    for number, line in _lines(text):
        try:
            reading.take(line)
        except DomainError as error:
            raise DomainError(f"line {number}: {error}") from None
    return reading.read()


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that says something, and its number; one that ends in a backslash goes on in the next."""
    begun, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.split("#")[0].strip()
        first = first if begun else number
        if line.endswith("\\"):
            begun += line[:-1] + " "
        elif begun or line:
            yield first, begun + line
            begun = ""


class _Reading:
    """A file that is being read, line by line."""

    def __init__(self) -> None:
        self._level: dict[str, str] = {}  # of each domain, empty for a switch
        self._below: dict[str, list[str]] = {}  # the domains in each, which a switch may name before they are there
        self._of: dict[str, list[str]] = {}  # the domains that name each node
        self._gbps: dict[str, float] = {}

    def take(self, line: str) -> None:
        words = line.split()
        if "=" in line:
            given = {key.lower(): value for key, _, value in (word.partition("=") for word in words)}
            name, below = given.get("switchname") or given.get("blockname"), given.get("switches")
            if name is not None and given.keys() & {"nodes", "switches"}:
                level = "block" if "blockname" in given else ""
                self._add(level, name, hosts(given["nodes"]) if "nodes" in given else [], hosts(below) if below else [])
            elif not given.keys() & {"blocksizes", "allowedsizes"}:
                raise DomainError(f"no SwitchName or BlockName with Nodes or Switches: {line[:60]}")
        elif words[0] == "bandwidth" and len(words) == 3:
            self._gbps[words[1]] = float(words[2]) if _NUMBER.fullmatch(words[2]) else 0.0
            if not 0 < self._gbps[words[1]] < 1e6:
                raise DomainError(f"{words[2][:60]} is no number of Gb/s above 0")
        elif found := _PLAIN.fullmatch(line):
            level, name, members = found.groups()
            given = hosts(members)
            inside = [each for each in given if each in self._level]
            if inside and len(inside) < len(given):
                raise DomainError(f"{next(each for each in given if each not in self._level)} is no domain named above")
            self._add(_checked(level, "level"), name, [] if inside else given, inside)
        else:
            raise DomainError(f"neither 'LEVEL NAME: MEMBERS', 'bandwidth LEVEL GBPS' nor Slurm's: {line[:60]}")

    def _add(self, level: str, name: str, nodes: list[str], below: list[str]) -> None:
        if _checked(name, "domain") in self._level:
            raise DomainError(f"{name} is there twice")
        self._level[name], self._below[name] = level, below
        for node in nodes:
            self._of.setdefault(node, []).append(name)
        if len(self._of) > MOST_NODES:
            raise DomainError(f"more than {MOST_NODES} nodes")

    def read(self) -> Topology:
        parent = dict[str, str]()
        for name, below in self._below.items():
            for each in below:
                if each not in self._level:
                    raise DomainError(f"{name}: there is no switch {each}")
                if parent.setdefault(each, name) != name:
                    raise DomainError(f"{each} is in {parent[each]} and in {name}")
        heights = {name: self._height_of(name) for name in self._level}
        of_switches = sorted({heights[name] for name, level in self._level.items() if not level})
        level_of = {name: level or _of_height(heights[name]) for name, level in self._level.items()}
        levels = tuple(dict.fromkeys([*filter(None, self._level.values()), *map(_of_height, of_switches)]))
        if len(levels) > MOST_LEVELS or {NODE, CLUSTER} & {*levels}:
            raise DomainError(f"at most {MOST_LEVELS} levels, none of them called {NODE} or {CLUSTER}")
        if unknown := sorted(self._gbps.keys() - {*levels}):
            raise DomainError(f"there is no level {unknown[0]}, of which a bandwidth is stated")
        places, above = dict[str, Place](), dict[str, Place]()
        for node, names in self._of.items():
            place = dict[str, str]()
            for at in names:
                while at:
                    if place.setdefault(level_of[at], at) != at:
                        raise DomainError(f"{node} is in {place[level_of[at]]} and in {at}, both {level_of[at]}")
                    at = parent.get(at, "")
            places[node] = tuple(map(place.get, levels))
            for at, name in enumerate(places[node]):
                if name is not None and above.setdefault(name, places[node][at:]) != places[node][at:]:
                    raise DomainError(f"some nodes of {name} are in another domain of a wider level, or in none")
        return Topology(levels, places, self._gbps)

    def _height_of(self, name: str, depth: int = 0) -> int:
        if depth > MOST_LEVELS:
            raise DomainError(f"{name} is below more than {MOST_LEVELS} switches, or below itself")
        return max((1 + self._height_of(each, depth + 1) for each in self._below[name]), default=0)


def _of_height(height: int) -> str:
    return ("rack", "block")[height] if height < 2 else f"level{height + 1}"


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise DomainError(f"{name[:60]} is no name of a {what}")
    return name


def hosts(given: str) -> list[str]:
    """Return the names of a list such as ``a,b[1-3,07-09]``; ``DomainError``: none, or more than ``MOST_NODES``."""
    found: list[str] = []
    rest = _BRACKETS.sub("", given)
    if rest.replace(",", "").strip() or not given.strip():
        raise DomainError(f"no list of names such as a,b[1-3]: {given[:60] or 'it is empty'}")
    for before, ranges, after, plain in _BRACKETS.findall(given):
        for each in ranges.split(",") if ranges else ():
            low, _, high = each.partition("-")
            high = high or low
            if not low.isdecimal() or not high.isdecimal() or not 0 <= int(high) - int(low) < MOST_NODES - len(found):
                raise DomainError(f"no range of numbers: {each}")
            found += [_checked(f"{before}{at:0{len(low)}}{after}", "node") for at in range(int(low), int(high) + 1)]
        if plain:
            found.append(_checked(plain, "node"))
    return found
