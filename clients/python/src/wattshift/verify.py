"""Check an export of the ledger: `python verify.py FILE`, or `wattshift verify FILE`. It needs only Python 3.11.

FILE is what `wattshift report --lines FILE --seals` wrote: CSV or JSON lines. It recomputes every line from what
was metered, every total of the report from the lines, every hash, and every signature (Ed25519 by the arithmetic of
RFC 8032). docs/ledger.md describes the format. The exit code is 0 if nothing is wrong.
"""

import csv
import json
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from datetime import date, datetime
from functools import lru_cache
from hashlib import sha256, sha512
from itertools import pairwise
from multiprocessing import Pool
from multiprocessing.pool import ThreadPool
from operator import add, itemgetter, methodcaller

HASHED = (
    "node_id boot_id sequence allocation_id job_id start_at end_at gpus gpu_energy_j cpu_energy_j static_energy_j "
    "gpu_source cpu_source zone signal intensity_gco2_per_kwh intensity_estimated pue carbon_gco2 basis "
    "reported_energy_j devices provider fetched_at intensity_kind release"
)  # the columns that a batch of version 1 is hashed over, in their order; then those of a daily sum
SUMMED = (
    "node_id allocation_id job_id start_at end_at zone signal pue energy_j gpu_energy_j estimated_energy_j carbon_gco2 "
    "gpu_s estimated"
)
TEXTS = "batch sum_number start_at end_at gpu_source cpu_source intensity_estimated estimated"
OF_ALL = "gpu_energy_j pue carbon_gco2 energy_j estimated_energy_j gpu_s facility_energy_j estimated_gco2"
OF_RAW = "gpus cpu_energy_j static_energy_j intensity_gco2_per_kwh"
NAMES = "job_id tenant project user model zone node_id"
GROUPS = ("job", "tenant", "project", "user", "model", "zone", "node", "day", "week", "month")
FIGURES = (
    *("energy_j", "gpu_energy_j", "estimated_energy_j", "facility_energy_j", "carbon_gco2", "estimated_gco2", "gpu_s"),
)
MEASURED, NOTHING, AT_MOST, BLOCK = ("counter", "sampled"), "0" * 64, 20, 1 << 16
WORDS, SPLIT = {None: "", True: "true", False: "false"}, methodcaller("split", ",")
Batch = namedtuple("Batch", "id lane number version at lines first last digest")

# The curve of RFC 8032, section 5.1.
P, ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D, ROOT = -121665 * pow(121666, -1, P) % P, pow(2, (P - 1) // 4, P)


def _point(data: bytes):
    y, odd = int.from_bytes(data, "little") & (2**255 - 1), data[31] >> 7
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if (x * x - square) % P == 0 else x * ROOT % P
    if y >= P or (x * x - square) % P or (x == 0 and odd):
        return None
    x = x if x & 1 == odd else P - x
    return x, y, 1, x * y % P


def _add(a, b):
    e, f = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    c, d = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    return (f - e) * (d - c) % P, (d + c) * (f + e) % P, (d - c) * (d + c) % P, (f - e) * (f + e) % P


def _times(n: int, point):
    result = (0, 1, 1, 0)
    while n:
        result, point, n = (_add(result, point) if n & 1 else result), _add(point, point), n >> 1
    return result


BASE = _point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def signed(public: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether a signature of a message is valid for a key: RFC 8032, section 5.1.7."""
    if len(public) != 32 or len(signature) != 64 or (s := int.from_bytes(signature[32:], "little")) >= ORDER:
        return False
    if (key := _point(public)) is None or (r := _point(signature[:32])) is None:
        return False
    h = int.from_bytes(sha512(signature[:32] + public + message).digest(), "little") % ORDER
    a, b = _times(s, BASE), _add(r, _times(h, key))
    return (a[0] * b[2] - b[0] * a[2]) % P == 0 and (a[1] * b[2] - b[1] * a[2]) % P == 0


def zeros() -> list[float]:
    return [0.0] * len(FIGURES)


def plus(sums: list[float], amounts) -> list[float]:
    return list(map(float.__add__, sums, amounts))


def digest_of(texts: list[str], columns: str) -> str:
    """Return the SHA-256 of lines sorted by their text; empty if a field contains a separator."""
    body = "".join(f"{text}\n" for text in sorted(texts))
    fits = body.count("\t") == columns.count(" ") * len(texts) and body.count("\n") == len(texts)
    return sha256(body.encode()).hexdigest() if fits else ""


def rows_of(path: str, first: int, last: int, columns: list[str], is_csv: bool) -> Iterator[list]:
    """Yield the rows of a part of the file, as text."""
    with open(path, "rb") as file:
        file.seek(first)
        while (left := last - file.tell()) > 0:
            block = (file.read(left) if left <= BLOCK else file.read(BLOCK) + file.readline()).decode()
            if not block:
                raise ValueError("is cut off")
            lines, plain = lines_of(block), block.replace(',"",', ",,")
            if is_csv:
                yield from csv.reader(lines, strict=True) if '"' in plain else map(SPLIT, lines_of(plain))
                continue
            for line in lines:
                row = json.loads(line, parse_float=str, parse_int=str)
                if list(row) != columns:
                    raise ValueError("a line has other fields than the first")
                yield [WORDS.get(value, value) for value in row.values()]


def lines_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []  # splitlines() knows other ends of lines, too


@lru_cache(1 << 12)
def length_s(began: str, ended: str) -> float:
    return max(0.0, (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds())


def check_part(path: str, first: int, last: int, columns: list[str], is_csv: bool, batches: dict, period) -> dict:
    """Recompute the lines between two offsets; return their sums, and what can be checked only for the whole file."""

    def fields(names: str):
        return itemgetter(*map(columns.index, names.split()))

    hashed, summed, named, texts, of_all, of_raw = map(fields, (HASHED, SUMMED, NAMES, TEXTS, OF_ALL, OF_RAW))
    start, end = ("" if period[0] == "-" else period[0]), ("~" if period[1] == "-" else period[1])
    sums, opened, of_sums = defaultdict(zeros), defaultdict(list), defaultdict(list)
    whole, faults, count, unsealed, latest = [], [], 0, 0, ""
    for row in rows_of(path, first, last, columns, is_csv):
        count += 1
        batch, number, began, ended, meter, cpu_meter, guessed, estimated = texts(row)
        gpu, pue, carbon, energy, modelled, gpu_s, facility, share = map(float, of_all(row))
        right, facility_j, its_share = start <= began < end and len(row) == len(columns), energy * pue, carbon
        if estimated != "true":
            its_share = carbon * modelled / energy if energy else 0.0
        if batch:
            gpus, cpu, static, factor = map(float, of_raw(row))
            parts = (0.0 if meter in MEASURED else gpu) + (0.0 if cpu_meter in MEASURED else cpu) + static
            held_s, grams = gpus * length_s(began, ended), energy / 3.6e6 * factor * pue
            right = (
                right
                and energy == gpu + cpu + static
                and modelled == parts
                and abs(gpu_s - held_s) <= 1e-9 * abs(held_s) + 1e-9
                and abs(carbon - grams) <= 1e-9 * abs(grams) + 1e-9
                and (estimated == "true") == (guessed == "true" or meter not in MEASURED)
            )
            if batch == "0":
                unsealed, latest = unsealed + 1, max(latest, began)
            else:
                found = opened[batch]
                found.append("\t".join(hashed(row)))
                lines, digest = batches.get(batch, (0, ""))
                if len(found) == lines:
                    whole.append(batch)
                    if digest_of(opened.pop(batch), HASHED) != digest:
                        faults.append(f"batch {batch} is not as it was hashed: a line of {began}")
        else:
            of_sums[number].append("\t".join(summed(row)))
        if not (
            right
            and abs(facility - facility_j) <= 1e-9 * abs(facility_j) + 1e-9
            and abs(share - its_share) <= 1e-9 * abs(its_share) + 1e-9
        ):
            faults.append(f"a line does not follow from what was metered: {','.join(row)}")
        key = began[:10], *named(row)
        total = sums[key]
        total[0] += energy
        total[1] += gpu
        total[2] += modelled
        total[3] += facility_j
        total[4] += carbon
        total[5] += its_share
        total[6] += gpu_s
    return {
        **{"sums": sums, "opened": opened, "of_sums": of_sums, "whole": whole, "faults": faults[:AT_MOST]},
        **{"count": count, "unsealed": unsealed, "latest": latest},
    }


class Check:
    """The check of one file, and what it found."""

    def __init__(self, path: str, processes: int) -> None:
        self.path, self.processes = path, processes
        self.faults: list[str] = []
        self.keys: set[str] = set()
        self.unsigned = 0

    def run(self) -> list[str]:
        """Return what is wrong; set `facts` to sentences on what was checked."""
        first, seals_at, columns, seals = self._ends()
        of = defaultdict(list)
        for kind, _, rest in (seal.partition(" ") for seal in seals):
            of[kind].append(rest)
        self.period = (of["period"] or ["- -"])[0].split(" ")
        self.batches = {each.id: each for each in (Batch(*rest.split(" ")) for rest in of["batch"])}
        if later := {each.version for each in self.batches.values()} - {"1"}:
            raise ValueError(f"version {max(later)} of the hashes is unknown: use the verify.py of a later release")
        parts = self._parts(first, seals_at, columns)
        sums, opened, of_sums = defaultdict(zeros), defaultdict(list), defaultdict(list)
        for part in parts:
            self.faults += part["faults"]
            for into, name, joined in ((sums, "sums", plus), (opened, "opened", add), (of_sums, "of_sums", add)):
                for key, found in part[name].items():
                    into[key] = joined(into[key], found)
        for kind, into in (("line", opened), ("sumline", of_sums)):
            for number, _, text in (rest.partition(" ") for rest in of[kind]):
                into[number].append(json.loads(text))
        for number, texts in opened.items():
            known = self.batches.get(number)
            if known is None or len(texts) != int(known.lines) or digest_of(texts, HASHED) != known.digest:
                self.faults.append(f"batch {number} is not as it was hashed: {len(texts)} lines")
        whole = [number for part in parts for number in part["whole"]] + list(opened)
        self.whole = set(whole)
        if len(whole) != len(self.whole):
            self.faults.append("a batch has its lines twice")
        since = self._days(of["day"], self._sums(of["sum"], of_sums))
        self._totals(of["total"], sums)
        self._signature("the file", *self.end, must=bool(self.keys))
        count, unsealed = (sum(part[name] for part in parts) for name in ("count", "unsealed"))
        latest = max((part["latest"] for part in parts), default="")
        if unsealed and since and latest >= since:
            self.faults.append(f"a line without a batch begins at {latest}, when lines had batches since {since}")
        self.facts = [
            f"{count} lines, each computed again; {len(of['total'])} totals, each summed again",
            f"{len(self.batches)} batches and {len(of['day'])} days hashed; {unsealed} lines are older than that",
            f"{self.unsigned} batches since the last signed day, or of days without a signature",
            *(f"signed by the key {key}" for key in sorted(self.keys) or ["of nobody: whoever has it can change it"]),
        ]
        return self.faults

    def _ends(self):
        """Read the head and the seals; the lines are between them."""
        with open(self.path, "rb") as file:
            head = file.readline()
            self.is_csv = not head.startswith(b"{")
            first, size = (file.tell() if self.is_csv else 0), file.seek(0, 2)
            file.seek(max(0, size - 65_536))
            last = file.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2]
            kind, key, signature, text = ([*self._seal(last).split(" ", 3), "", "", "", ""])[:4]
            if kind != "end":
                raise ValueError("has no seals, or was cut off; `wattshift report --lines FILE --seals` writes them")
            self.end = json.loads(text), key, signature
            self.stated = dict(line.split(" ", 1) for line in self.end[0].split("\n") if " " in line)
            seals_at, self.end_at = int(self.stated["lines_end"]), size - len(last.encode()) - 1
            file.seek(seals_at)
            seals = list(map(self._seal, lines_of(file.read(self.end_at - seals_at).decode())))
        columns = next(csv.reader([head.decode()])) if self.is_csv else list(json.loads(head))
        return first, seals_at, columns, seals

    def _seal(self, line: str) -> str:
        return line.removeprefix("# ") if self.is_csv else json.loads(line)["seal"]

    def _parts(self, first: int, last: int, columns: list[str]) -> list[dict]:
        """Check the lines in several processes, and meanwhile the whole file against the hash at its end."""
        cuts, known = [first], {each.id: (int(each.lines), each.digest) for each in self.batches.values()}
        with open(self.path, "rb") as file:
            for number in range(1, self.processes if last - first > 1 << 20 else 1):
                file.seek(first + (last - first) * number // self.processes)
                file.readline()
                cuts.append(max(cuts[-1], min(last, file.tell())))
        jobs = [(self.path, *part, columns, self.is_csv, known, self.period) for part in pairwise([*cuts, last])]
        with ThreadPool(1) if len(jobs) == 1 else Pool(len(jobs)) as pool, open(self.path, "rb") as file:
            found, whole = pool.starmap_async(check_part, jobs if first < last else []), sha256()
            while piece := file.read(min(1 << 20, max(0, self.end_at - file.tell()))):
                whole.update(piece)
            if whole.hexdigest() != self.stated["sha256"]:
                self.faults.append("the file is not as it was written: its SHA-256 is another")
            return found.get()

    def _signature(self, what: str, text: str, key: str, signature: str, must: bool = False) -> None:
        if key != "-":
            self.keys.add(key)
            if not signed(bytes.fromhex(key), text.encode(), bytes.fromhex(signature)):
                self.faults.append(f"the signature of {what} does not fit")
        elif must:
            self.faults.append(f"{what} is not signed, and others are")

    def _overlaps(self, first: str, last: str) -> bool:
        start, end = self.period
        return "-" not in (first, last) and (end == "-" or first < end) and (start == "-" or last >= start)

    def _stated(self, what: str, rows: list[str]):
        """Yield the statements of a kind, each with its fields, lanes and hash; each names the one before it."""
        before, last_key = NOTHING, "-"
        for number, row in enumerate(rows, 1):
            key, signature, quoted = row.split(" ", 2)
            text = json.loads(quoted)
            self._signature(f"{what} {number}", text, key, signature, must=last_key != "-")
            lines = [line.split(" ", 1) for line in text.split("\n") if " " in line]
            stated, last_key = dict(line for line in lines if line[0] != "lane"), key
            if stated.get("number") != str(number) or stated.get("before") != before:
                self.faults.append(f"the statement of {what} {number} does not follow the one before it")
            before = sha256(text.encode()).hexdigest()
            yield str(number), stated, [rest.split(" ") for name, rest in lines if name == "lane"], before, key

    def _sums(self, rows: list[str], of_sums: dict[str, list[str]]) -> dict[str, str]:
        """Check the daily sums; return which sum stands for each day, by the day's hash."""
        self.sum_hashes, replaced = {"0": NOTHING}, {}
        for number, stated, _, its_hash, _ in self._stated("sum", rows):
            self.sum_hashes[number] = its_hash
            if "replaces" in stated:
                replaced[stated["replaces"].partition(" ")[2]] = number
            lines, first, last = stated["lines"].split(" ")
            texts, whole = of_sums.pop(number, []), self._overlaps(first, last)
            if len(texts) != (int(lines) if whole else 0) or (whole and digest_of(texts, SUMMED) != stated["digest"]):
                self.faults.append(f"the lines of sum {number} are not those that were signed")
        self.faults += [f"lines are of sum {number}, which is not stated" for number in of_sums.keys() - {"0"}]
        return replaced

    def _days(self, rows: list[str], replaced: dict[str, str]) -> str:
        """Check the running hash of each lane, day by day; return since when lines have batches."""
        heads: dict[str, tuple[int, str]] = {}
        batches = {(each.lane, int(each.number)): each for each in self.batches.values()}
        since = ""
        for number, stated, lanes, its_hash, key in self._stated("day", rows):
            since = stated["since"]
            last_sum, _, hashed = stated["sums"].partition(" ")
            if self.sum_hashes.get(last_sum) != hashed:
                self.faults.append(f"day {number} names a sum {last_sum} that is not here")
            if self._overlaps(*stated["lines"].split(" ")[1:]) and replaced.pop(its_hash, None) is None:
                count = len(batches)
                for lane, end, mark in lanes:
                    if self._advance(lane, heads.get(lane, (0, NOTHING)), int(end), batches) != mark:
                        self.faults.append(f"lane {lane} of day {number} does not come to the hash that was signed")
                self.unsigned += count - len(batches) if key == "-" else 0
            heads = {lane: (int(end), mark) for lane, end, mark in lanes}
        self.unsigned += len(batches)
        for lane in sorted({lane for lane, _ in batches}):
            self._advance(lane, heads.get(lane, (0, NOTHING)), max(n for each, n in batches if each == lane), batches)
        self.faults += [f"batch {each.id} is of no day" for each in batches.values()]
        return since or min((each.at for each in self.batches.values()), default="")

    def _advance(self, lane: str, head: tuple[int, str], end: int, batches: dict) -> str:
        """Return the running hash of a lane at a batch, and remove the batches that it covers."""
        reached, running = head
        for number in range(reached + 1, end + 1):
            if (found := batches.pop((lane, number), None)) is None:
                self.faults.append(f"batch {number} of lane {lane} is missing")
                return ""
            text = f"{lane} {number} {found.at} {found.lines} {found.first} {found.last}\n{running}\n{found.digest}\n"
            running = sha256(f"wattshift ledger batch {found.version}\n{text}".encode()).hexdigest()
            if self._overlaps(found.first, found.last) and found.id not in self.whole:
                self.faults.append(f"the {found.lines} lines of batch {found.id} are missing")
        return running

    def _totals(self, rows: list[str], sums: dict[tuple[str, ...], list[float]]) -> None:
        again: dict = defaultdict(zeros)
        for (day, job, *names), amounts in sums.items():
            groups = [("all", "")] if job else [("all", ""), ("idle", "")]
            if names[0]:  # a job that the installation knows
                year, week, _ = date.fromisoformat(day).isocalendar()
                groups += zip(GROUPS, (job, *names, day, f"{year}-W{week:02}", day[:7]), strict=True)
            for group in groups:
                again[group] = plus(again[group], amounts)
        for row in rows:
            group, *figures, name = row.split(" ", 8)
            found = again.pop((group, json.loads(name)), zeros())
            for figure, stated, summed in zip(FIGURES, map(float, figures), found, strict=True):
                if abs(stated - summed) > 1e-9 * max(abs(stated), abs(summed)) + 1e-9:
                    self.faults.append(f"{figure} of {group} {name}: the report says {stated}, the lines {summed}")
        self.faults += [f"the report has no total of {group} {name}" for group, name in again]


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
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m wattshift.verify FILE [PUBLIC KEY]")
    sys.exit(verify(sys.argv[1], key=sys.argv[2] if len(sys.argv) == 3 else None))
