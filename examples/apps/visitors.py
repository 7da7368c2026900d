"""Visitors of applications: Poisson arrivals at the router for some time, and what came back.

python examples/apps/visitors.py --router URL --key KEY --seconds 60 photos=20 streets=10

`photos=20` is 20 requests per second on average. At the end, one line for each application: how many requests, how many
were not answered with 200, their 95th percentile of latency, and which variants answered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter

import aiohttp


class Visits:
    """What came back from one application."""

    def __init__(self, name: str, per_s: float) -> None:
        self.name, self.per_s = name, per_s
        self.latency_ms: list[float] = []
        self.variants: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    async def run(self, session: aiohttp.ClientSession, url: str, until_s: float, rng: random.Random) -> None:
        """Send requests until then, and wait for all answers."""
        at_s, asked = time.monotonic(), set[asyncio.Task[None]]()
        while (at_s := at_s + rng.expovariate(self.per_s)) < until_s:
            await asyncio.sleep(max(at_s - time.monotonic(), 0))
            asked.add(asyncio.create_task(self._ask(session, url)))
        await asyncio.gather(*asked)

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> None:
        began_s = time.monotonic()
        try:
            async with session.post(f"{url}/apps/{self.name}/label", data=b"image") as answer:
                await answer.read()
                if answer.status != 200:
                    self.failed[str(answer.status)] += 1
                    return
                self.variants[answer.headers.get("x-wattshift-variant", "?")] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed[type(error).__name__] += 1
            return
        self.latency_ms.append(1_000 * (time.monotonic() - began_s))

    def line(self) -> str:
        """Return what came back, in a line."""
        known = sorted(self.latency_ms)
        p95 = f"{known[int(0.95 * (len(known) - 1))]:.0f} ms" if known else "-"
        failed = ", ".join(f"{count} {why}" for why, count in self.failed.most_common()) or "0"
        mix = ", ".join(f"{count} {variant}" for variant, count in self.variants.most_common())
        total = len(known) + sum(self.failed.values())
        return f"{self.name}: {total} requests, failed: {failed}, p95 {p95}; {mix}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", nargs="+", metavar="APP=PER_S")
    parser.add_argument("--router", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    visits = [Visits(name, float(rate)) for name, _, rate in (each.partition("=") for each in given.apps)]
    timeout = aiohttp.ClientTimeout(total=120)
    headers = {"Authorization": f"Bearer {given.key}"}
    async with aiohttp.ClientSession(
        timeout=timeout, headers=headers, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        until_s = time.monotonic() + given.seconds
        await asyncio.gather(*(each.run(session, given.router, until_s, rng) for each in visits))
    for each in visits:
        print(each.line())


if __name__ == "__main__":
    asyncio.run(main())
