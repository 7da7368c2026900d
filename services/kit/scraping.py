"""Prometheus's metrics of other processes: several as one text whose lines say whose they are, or sums."""

import math
from collections.abc import Collection, Iterable, Mapping

import aiohttp
from yarl import URL

from services.kit.http import read_most

SCRAPED_WITHIN_S = 8.0  #: Less than the ten seconds that Prometheus waits by default
LARGEST_BYTES = 64 * 2**20
SERVICE_UP = (
    "# HELP wattshift_service_up 1 for a process that showed its figures, 0 for one that did not.\n"
    "# TYPE wattshift_service_up gauge\n"
    "wattshift_service_up {}\n"
)
"""Stands before a process's own text; with what it is in place of the braces."""


async def scraped(
    session: aiohttp.ClientSession,
    url: str | URL,
    headers: Mapping[str, str],
    host: str | None = None,
    tls: aiohttp.Fingerprint | bool = True,
) -> str | None:
    """Return what is at an address; None if the process does not answer or does not let the caller in.

    Args:
        host: The name in the process's certificate, if it differs from the address.
        tls: The fingerprint of the certificate, if the process is known by that.
    """
    timeout = aiohttp.ClientTimeout(total=SCRAPED_WITHIN_S)
    try:
        async with session.get(
            url, headers=headers, timeout=timeout, allow_redirects=False, server_hostname=host, ssl=tls
        ) as answer:
            return (await read_most(answer, LARGEST_BYTES)).decode() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


def place_of(url: str | URL) -> str:
    """Return host and port of an address, as in Prometheus's ``instance`` label; for a Unix socket, its name."""
    found = URL(url)
    return f"{found.host}" if found.port is None else f"{found.host}:{found.port}"


def merged(parts: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """Merge texts in Prometheus's format: a family in several parts appears once, its lines with each part's labels.

    Args:
        parts: Labels to add, and the text they are added to, which must not have these labels.
    """
    heads: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for labels, text in parts:
        added = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())
        family, is_first = "", False
        for line in text.split("\n"):  # no other line end: labels may have them
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                if name != family:
                    family, is_first = name, name not in heads
                    heads.setdefault(family, [])
                if is_first:
                    heads[family].append(line)
            elif line:
                lines.setdefault(family, []).append(_with(line, added))
    return "".join(f"{line}\n" for family, head in heads.items() for line in (*head, *lines.get(family, ())))


def _with(line: str, added: str) -> str:
    """Return a sample with labels added before its own; a name contains neither a brace nor a space."""
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space:
        rest = line[brace + 1 :]
        return f"{line[:brace]}{{{added}{'' if rest.startswith('}') else ','}{rest}"
    return f"{line[:space]}{{{added}}}{line[space:]}"


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def metric_sum(metrics: str, names: Collection[str]) -> float | None:
    """Return the sum of metrics, a Prometheus text, over their labels; None if there are none, or one is no number."""
    # The Prometheus client's parser takes 9 s for 1 MB of escaped quotes, and whoever asks has an event loop.
    found: list[float] = []
    for line in metrics.split("\n"):
        name = next((each for each in names if line.startswith((f"{each}{{", f"{each} ", f"{each}\t"))), None)
        if name is None:
            continue
        try:  # behind the labels, which may have braces of their own: a value, and perhaps when it was measured
            value, *_ = map(float, line[len(name) :].rpartition("}")[2].split())
        except ValueError:
            return None
        found.append(value)
    total = sum(found)
    return total if found and math.isfinite(total) else None
