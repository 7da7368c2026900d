"""Check an export of the ledger: `python verify.py FILE`, or `wattshift verify FILE`. Needs Python 3.11, nothing else.

FILE is what `wattshift report --lines FILE --seals` wrote: CSV or JSON lines. Every line is computed again from what
was metered, every total of the report from the lines, every hash, and every signature (Ed25519 by the arithmetic of
RFC 8032). docs/ledger.md describes the format. The exit code is 0 if nothing is wrong.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from datetime import date, datetime
from hashlib import sha256, sha512
from itertools import pairwise
from multiprocessing import Pool
from operator import itemgetter

HASHED = {
    1: "node_id boot_id sequence allocation_id job_id start_at end_at gpus gpu_energy_j cpu_energy_j static_energy_j "
    "gpu_source cpu_source zone signal intensity_gco2_per_kwh intensity_estimated pue carbon_gco2 basis "
    "reported_energy_j devices provider fetched_at intensity_kind release"
}
"""The columns that a batch of a version is hashed over, in their order; `SUMMED`: those of a daily sum."""
SUMMED = (
    "node_id allocation_id job_id start_at end_at zone signal pue energy_j gpu_energy_j estimated_energy_j carbon_gco2 "
    "gpu_s estimated"
)
USED = (
    "batch sum_number start_at end_at gpus gpu_energy_j cpu_energy_j static_energy_j gpu_source cpu_source "
    "intensity_estimated intensity_gco2_per_kwh pue carbon_gco2 energy_j estimated_energy_j gpu_s facility_energy_j "
    "estimated_gco2 estimated node_id"
)
NAMES = "job_id tenant project user model zone node_id"
GROUPS = ("job", "tenant", "project", "user", "model", "zone", "node", "day", "week", "month")
FIGURES = (
    *("energy_j", "gpu_energy_j", "estimated_energy_j", "facility_energy_j", "carbon_gco2", "estimated_gco2", "gpu_s"),
)
MEASURED = ("counter", "sampled")
NOTHING, NO_BATCH, NO_SUMS = "0" * 64, (0, 0, ""), (0.0,) * len(FIGURES)
JSON_WORDS = {None: "", True: "true", False: "false"}
AT_MOST = 20

# The curve of RFC 8032, section 5.1.
P, ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
ROOT = pow(2, (P - 1) // 4, P)


def _x(y: int, odd: int) -> int | None:
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if (x * x - square) % P == 0 else x * ROOT % P
    if (x * x - square) % P or (x == 0 and odd):
        return None
    return x if x & 1 == odd else P - x


def _add(a, b):
    e, f = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    c, d = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    return (f - e) * (d - c) % P, (d + c) * (f + e) % P, (d - c) * (d + c) % P, (f - e) * (f + e) % P


def _times(n: int, point):
    result = (0, 1, 1, 0)
    while n:
        result, point, n = (_add(result, point) if n & 1 else result), _add(point, point), n >> 1
    return result


def _point(data: bytes):
    y = int.from_bytes(data, "little")
    odd, y = y >> 255, y & (2**255 - 1)
    x = _x(y, odd) if y < P else None
    return None if x is None else (x, y, 1, x * y % P)


BASE = _point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def signed(public: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether a signature is that of a message by a key: RFC 8032, section 5.1.7."""
    if len(public) != 32 or len(signature) != 64 or (s := int.from_bytes(signature[32:], "little")) >= ORDER:
        return False
    key, r = _point(public), _point(signature[:32])
    if key is None or r is None:
        return False
    h = int.from_bytes(sha512(signature[:32] + public + message).digest(), "little") % ORDER
    a, b = _times(s, BASE), _add(r, _times(h, key))
    return (a[0] * b[2] - b[0] * a[2]) % P == 0 and (a[1] * b[2] - b[1] * a[2]) % P == 0


def close(a: float, b: float) -> bool:
    """Return whether two figures are the same but for rounding."""
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-9


def rows_of(path: str, first: int, last: int, is_csv: bool, columns: list[str]):
    """Yield the rows of a part of the file, as text."""
    with open(path, "rb") as file:
        file.seek(first)
        lines = map(bytes.decode, _up_to(file, last - first))
        if is_csv:
            yield from csv.reader(lines, strict=True)
            return
        for line in lines:
            row = json.loads(line, parse_float=str, parse_int=str)
            if list(row) != columns:
                raise ValueError("a line has other fields than the first")
            yield [JSON_WORDS.get(value, value) for value in row.values()]


def _up_to(file, size: int):
    while size > 0 and (line := file.readline()):
        size -= len(line)
        yield line


def check_part(path: str, first: int, last: int, is_csv: bool, columns: list[str], known: dict, period) -> dict:
    """Compute the lines between two offsets again; return their sums, and what can be said only of the whole."""

    def fields(names: str):
        return itemgetter(*map(columns.index, names.split()))

    hashed, summed, used, named = fields(HASHED[1]), fields(SUMMED), fields(USED), fields(NAMES)
    start, end = ("" if period[0] == "-" else period[0]), ("~" if period[1] == "-" else period[1])
    sums, opened, of_sums, whole, faults = {}, {}, defaultdict(list), [], []
    count, unsealed, latest, interval, length_s, instant = 0, 0, "", None, 0.0, datetime.fromisoformat
    for row in rows_of(path, first, last, is_csv, columns):
        count += 1
        batch, number, began, ended, gpus, gpu_j, cpu_j, static_j, meter, cpu_meter, *rest = used(row)
        guessed, factor, pue, carbon, energy, modelled, seconds, facility, share, estimated, node = rest
        gpu, energy_j, carbon_g, is_estimated = float(gpu_j), float(energy), float(carbon), estimated == "true"
        modelled_j, held_s, right = float(modelled), float(seconds), start <= began < end and len(row) == len(columns)
        if batch:
            cpu, static = float(cpu_j), float(static_j)
            parts = (0.0 if meter in MEASURED else gpu) + (0.0 if cpu_meter in MEASURED else cpu) + static
            if (began, ended) != interval:
                interval = began, ended
                length_s = max(0.0, (instant(ended) - instant(began)).total_seconds())
            right = (
                right
                and energy_j == gpu + cpu + static
                and modelled_j == parts
                and abs(held_s - int(gpus) * length_s) <= 1e-9 * abs(held_s) + 1e-9
                and abs(carbon_g - energy_j / 3.6e6 * float(factor) * float(pue)) <= 1e-9 * abs(carbon_g) + 1e-9
                and is_estimated == (guessed == "true" or meter not in MEASURED)
            )
            if batch == "0":
                unsealed, latest = unsealed + 1, max(latest, began)
            else:
                found = opened.setdefault(batch, [])
                found.append("\t".join(hashed(row)))
                _, lines, digest = known.get(batch, NO_BATCH)
                if len(found) == lines:
                    whole.append(batch)
                    if digest_of(opened.pop(batch), HASHED[1]) != digest:
                        faults.append(f"batch {batch} is not as it was hashed: a line of {began}, node {node}")
        else:
            of_sums[number].append("\t".join(summed(row)))
        facility_j, share_g = energy_j * float(pue), carbon_g
        if not is_estimated:
            share_g = carbon_g * modelled_j / energy_j if energy_j else 0.0
        if not (
            right
            and abs(float(facility) - facility_j) <= 1e-9 * abs(facility_j) + 1e-9
            and abs(float(share) - share_g) <= 1e-9 * abs(share_g) + 1e-9
        ):
            faults.append(f"a line does not follow from what was metered: {began}, node {node}, batch {batch or '-'}")
        if (known_sums := sums.get(key := (began[:10], *named(row)))) is None:
            known_sums = sums[key] = [*NO_SUMS]
        for place, amount in enumerate((energy_j, gpu, modelled_j, facility_j, carbon_g, share_g, held_s)):
            known_sums[place] += amount
    return {
        **{"sums": sums, "opened": opened, "of_sums": of_sums, "whole": whole, "faults": faults[:AT_MOST]},
        **{"count": count, "unsealed": unsealed, "latest": latest},
    }


def digest_of(texts: list[str], columns: str) -> str:
    """Return the SHA-256 of lines in the order of their text; none if a field has what separates them."""
    body = "".join(f"{text}\n" for text in sorted(texts))
    if body.count("\t") != columns.count(" ") * len(texts) or body.count("\n") != len(texts):
        return ""
    return sha256(body.encode()).hexdigest()


class Check:
    """What is found of one file."""

    def __init__(self, path: str, processes: int) -> None:
        self.path, self.processes = path, processes
        self.faults: list[str] = []
        self.keys: set[str] = set()
        self.unsigned = 0

    def run(self) -> list[str]:
        """Return what is wrong; sets `facts`, sentences of what was checked."""
        first, seals_at, columns = self._ends()
        kinds = defaultdict(list)
        for words in self.seals:
            kind, _, rest = words.partition(" ")
            kinds[kind].append(rest)
        self.period = (kinds["period"] or ["- -"])[0].split(" ")
        self.batches = {each[0]: each[1:] for each in (rest.split(" ") for rest in kinds["batch"])}
        if later := {b[2] for b in self.batches.values()} - {str(version) for version in HASHED}:
            raise ValueError(
                f"version {max(later)} of the hashes is unknown here: use the verify.py of a later release"
            )
        known = {number: (int(b[2]), int(b[4]), b[7]) for number, b in self.batches.items()}
        parts = self._parts(first, seals_at, columns, known)
        opened, days = defaultdict(list), defaultdict(list)
        self.sums: dict = {}
        for part in parts:
            self.faults += part["faults"]
            for number, texts in part["opened"].items():
                opened[number] += texts
            for number, texts in part["of_sums"].items():
                days[number] += texts
            for key, amounts in part["sums"].items():
                self.sums[key] = tuple(map(float.__add__, self.sums.get(key, NO_SUMS), amounts))
        for kind, into in (("line", opened), ("sumline", days)):
            for rest in kinds[kind]:
                number, _, text = rest.partition(" ")
                into[number].append(json.loads(text))
        whole = [number for part in parts for number in part["whole"]]
        for number, texts in opened.items():
            version, lines, digest = known.get(number, NO_BATCH)
            if version not in HASHED or len(texts) != lines:
                self.faults.append(f"batch {number} has {len(texts)} lines instead of {lines}")
            elif digest_of(texts, HASHED[version]) != digest:
                self.faults.append(f"batch {number} is not as it was hashed")
            whole.append(number)
        if len(whole) != len(set(whole)):
            self.faults.append("a batch has its lines twice")
        self.whole = set(whole)
        self.count, unsealed = sum(part["count"] for part in parts), sum(part["unsealed"] for part in parts)
        latest = max((part["latest"] for part in parts), default="")
        since = self._days(kinds["day"], self._sums(kinds["sum"], days))
        self._totals(kinds["total"])
        self._signature("the file", *self.end, must=bool(self.keys))
        if unsealed and since and latest >= since:
            self.faults.append(f"a line without a batch begins at {latest}, when lines had batches since {since}")
        self.facts = [
            f"{self.count} lines, each computed again; {len(kinds['total'])} totals, each summed again",
            f"{len(self.batches)} batches and {len(kinds['day'])} days hashed; {unsealed} lines are older than that",
            f"{self.unsigned} batches since the last signed day, or of days without a signature",
            *(f"signed by the key {key}" for key in sorted(self.keys) or ["of nobody: whoever has it can change it"]),
        ]
        return self.faults

    def _ends(self):
        """Read the head and the seals, and check the whole file against its end."""
        with open(self.path, "rb") as file:
            head = file.readline()
            self.is_csv = not head.startswith(b"{")
            first, size = (file.tell() if self.is_csv else 0), file.seek(0, 2)
            file.seek(max(0, size - 65_536))
            last = file.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2]
            kind, key, signature, text = ([*self._seal(last).split(" ", 3), "", "", "", ""])[:4]
            if kind != "end":
                raise ValueError("has no seals, or was cut off; `wattshift report --lines FILE --seals` writes them")
            stated = dict(line.split(" ", 1) for line in json.loads(text).split("\n") if " " in line)
            seals_at, end_at = int(stated["lines_end"]), size - len(last.encode()) - 1
            self.end = json.loads(text), key, signature
            file.seek(0)
            whole = sha256()
            for piece in iter(lambda: file.read(min(1 << 20, max(0, end_at - file.tell()))), b""):
                whole.update(piece)
            if whole.hexdigest() != stated["sha256"]:
                self.faults.append("the file is not as it was written: its SHA-256 is another")
            file.seek(seals_at)
            body = file.read(end_at - seals_at).decode()
        self.seals = [self._seal(line) for line in body.splitlines()]
        columns = next(csv.reader([head.decode()])) if self.is_csv else list(json.loads(head))
        if first == seals_at:
            columns = f"{HASHED[1]} {SUMMED} {USED} {NAMES}".split()
        return first, seals_at, columns

    def _seal(self, line: str) -> str:
        return line.removeprefix("# ") if self.is_csv else json.loads(line)["seal"]

    def _parts(self, first: int, last: int, columns, known) -> list[dict]:
        cuts = [first]
        with open(self.path, "rb") as file:
            for number in range(1, self.processes):
                file.seek(first + (last - first) * number // self.processes)
                file.readline()
                cuts.append(max(cuts[-1], min(last, file.tell())))
        cuts.append(last)
        if last - first < 1 << 20:
            return [check_part(self.path, first, last, self.is_csv, columns, known, self.period)]
        jobs = [(self.path, *part, self.is_csv, columns, known, self.period) for part in pairwise(cuts)]
        with Pool(self.processes) as pool:
            return pool.starmap(check_part, jobs)

    def _signature(self, what: str, text: str, key: str, signature: str, must: bool = False) -> None:
        if key == "-":
            if must:
                self.faults.append(f"{what} is not signed, and others are")
            return
        if not signed(bytes.fromhex(key), text.encode(), bytes.fromhex(signature)):
            self.faults.append(f"the signature of {what} does not fit")
        self.keys.add(key)

    def _overlaps(self, first: str, last: str) -> bool:
        if "-" in (first, last):
            return False
        start, end = (None if each == "-" else datetime.fromisoformat(each) for each in self.period)
        began, ended = datetime.fromisoformat(first), datetime.fromisoformat(last)
        return (end is None or began < end) and (start is None or ended >= start)

    def _stated(self, what: str, rows: list[str]):
        """Yield the statements of a kind, each with its fields; each names the one before it."""
        before, last_key = NOTHING, "-"
        for number, row in enumerate(rows, 1):
            key, signature, quoted = row.split(" ", 2)
            text = json.loads(quoted)
            self._signature(f"{what} {number}", text, key, signature, must=last_key != "-")
            last_key = key
            fields = dict(line.partition(" ")[::2] for line in text.split("\n") if not line.startswith("lane "))
            if fields.get("number") != str(number) or fields.get("before") != before:
                self.faults.append(f"the statement of {what} {number} does not follow the one before it")
            before = sha256(text.encode()).hexdigest()
            yield number, text, fields, before, key

    def _sums(self, rows: list[str], days: dict[str, list[str]]) -> dict[str, str]:
        """Check the daily sums; return the hash of each day that one stands for, and of each sum by its number."""
        self.sum_hashes, replaced = {"0": NOTHING}, {}
        for number, _, fields, stated, _ in self._stated("sum", rows):
            self.sum_hashes[str(number)] = stated
            if "replaces" in fields:
                replaced[fields["replaces"].partition(" ")[2]] = str(number)
            lines, first, last = fields["lines"].split(" ")
            texts = days.pop(str(number), [])
            if not self._overlaps(first, last):
                wrong = bool(texts)
            else:
                wrong = len(texts) != int(lines) or digest_of(texts, SUMMED) != fields["digest"]
            if wrong:
                self.faults.append(f"the lines of sum {number} are not those that were signed")
        for number in days.keys() - {"0"}:
            self.faults.append(f"lines are of sum {number}, which is not stated")
        return replaced

    def _days(self, rows: list[str], replaced: dict[str, str]) -> str:
        """Check the running hash of each lane, day by day; return since when lines have batches."""
        heads: dict[str, tuple[int, str]] = {}
        batches = {(b[0], int(b[1])): number for number, b in self.batches.items()}
        since = ""
        for number, text, fields, stated, key in self._stated("day", rows):
            since = fields["since"]
            last_sum, _, hashed = fields["sums"].partition(" ")
            if self.sum_hashes.get(last_sum) != hashed:
                self.faults.append(f"day {number} names a sum {last_sum} that is not here")
            ends = dict(line.split(" ")[1:3] for line in text.split("\n") if line.startswith("lane "))
            marks = dict(line.split(" ")[1::2] for line in text.split("\n") if line.startswith("lane "))
            if self._overlaps(*fields["lines"].split(" ")[1:]) and replaced.pop(stated, None) is None:
                count = len(batches)
                for lane, end in ends.items():
                    if self._advance(lane, heads.get(lane, (0, NOTHING)), int(end), batches) != marks[lane]:
                        self.faults.append(f"lane {lane} of day {number} does not come to the hash that was signed")
                self.unsigned += count - len(batches) if key == "-" else 0
            heads = {lane: (int(end), marks[lane]) for lane, end in ends.items()}
        self.unsigned += len(batches)
        for lane in sorted({lane for lane, _ in batches}):
            self._advance(lane, heads.get(lane, (0, NOTHING)), max(n for each, n in batches if each == lane), batches)
        if batches:
            self.faults.append(f"batch {next(iter(batches.values()))} is of no day")
        return since or min((b[3] for b in self.batches.values()), default="")

    def _advance(self, lane: str, head: tuple[int, str], end: int, batches: dict) -> str:
        """Return the running hash of a lane at a batch, and take the batches that it covers."""
        reached, running = head
        for number in range(reached + 1, end + 1):
            if (found := batches.pop((lane, number), None)) is None:
                self.faults.append(f"batch {number} of lane {lane} is missing")
                return ""
            _, _, version, at, lines, first, last, digest = self.batches[found]
            head_line = f"{lane} {number} {at} {lines} {first} {last}"
            text = f"wattshift ledger batch {version}\n{head_line}\n{running}\n{digest}\n"
            running = sha256(text.encode()).hexdigest()
            if self._overlaps(first, last) and found not in self.whole:
                self.faults.append(f"the {lines} lines of batch {found} are missing")
        return running

    def _totals(self, rows: list[str]) -> None:
        """Sum every total again."""
        found: dict = defaultdict(lambda: NO_SUMS)
        for (day, *names), amounts in self.sums.items():
            job = names[0]
            groups = [("all", "")] if job else [("all", ""), ("idle", "")]
            if names[1]:  # a job that the installation knows
                year, week, _ = date.fromisoformat(day).isocalendar()
                groups += zip(GROUPS, (*names, day, f"{year}-W{week:02}", day[:7]), strict=True)
            for group in groups:
                found[group] = tuple(map(float.__add__, found[group], amounts))
        for row in rows:
            group, *figures = row.split(" ", 8)
            name = json.loads(figures.pop())
            again = found.pop((group, name), NO_SUMS)
            for figure, stated, summed in zip(FIGURES, figures, again, strict=True):
                if not close(float(stated), summed):
                    self.faults.append(f"{figure} of {group} {name}: the report says {stated}, the lines {summed}")
        for group, name in found:
            self.faults.append(f"the report has no total of {group} {name}")


def verify(path: str, processes: int = 2, key: str | None = None) -> int:
    """Check a file, and print what was found; return the exit code."""
    check = Check(path, processes)
    try:
        faults = check.run()
    except (OSError, ValueError, KeyError, IndexError, TypeError, csv.Error) as error:
        print(f"{path}: cannot be checked: {error}", file=sys.stderr)
        return 1
    if key and check.keys != {key.lower()}:
        faults.append(f"it is signed by {', '.join(sorted(check.keys)) or 'no key'}, not by {key}")
    for sentence in check.facts + [f"WRONG: {fault}" for fault in faults[:AT_MOST]]:
        print("".join(letter if letter.isprintable() else "?" for letter in sentence))
    print("NOT RIGHT" if faults else "right: nothing was changed, added or left out")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python verify.py FILE [PUBLIC KEY]")
    sys.exit(verify(sys.argv[1], key=sys.argv[2] if len(sys.argv) == 3 else None))
