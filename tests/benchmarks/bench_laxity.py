"""The queue of requests: how long it takes to put, take and rank 10,000 of them.

    ./test --bench laxity

No order changes while time passes, so that nothing is ranked again for that: a tick of the clock costs nothing. What
can change all keys at once is another prediction of the instances' speed (``retime``). CPU time of this process, one
thread, the median of repeats; orders have a tenth of their requests removed before. Fails where ranking all anew takes
more than ``LIMIT_MS``, or putting one in and taking one out together more than ``LIMIT_US``.
"""

from __future__ import annotations

import gc
import sys
import time
from statistics import median

import numpy as np

from services.core.policies.freesh.laxity import Order, ServiceTimes, ServingRequest
from services.core.policies.freesh.request_queue import RequestQueue
from tests.benchmarks.results import write_result

REQUESTS, REPEATS, TENANTS = 10_000, 15, 8
LIMIT_MS, LIMIT_US = 50.0, 50.0


def measured(order: Order) -> dict[str, float | str]:
    """Return the milliseconds of ranking anew, and the microseconds of a push and of a pop."""
    random = np.random.default_rng(1)
    arrivals, lengths = random.uniform(0, 600, REQUESTS), random.integers(1, 800, REQUESTS)
    ranked_ms, push_us, pop_us = list[float](), list[float](), list[float]()
    for repeat in range(REPEATS):
        queue = RequestQueue(order, ServiceTimes(0.2, 0.05))
        requests = [
            ServingRequest(f"r{at}", arrival, float(tokens), tenant=f"t{at % TENANTS}")
            for at, (arrival, tokens) in enumerate(zip(arrivals.tolist(), lengths.tolist(), strict=True))
        ]
        gc.collect()
        began = time.process_time()
        for request in requests:
            queue.push(request)
        push_us.append(1e6 * (time.process_time() - began) / REQUESTS)
        for request in requests[::10]:
            queue.remove(request.id)
        began = time.process_time()
        queue.retime(ServiceTimes(0.1 + 0.01 * repeat, 0.04))
        ranked_ms.append(1e3 * (time.process_time() - began))
        left = len(queue)
        began = time.process_time()
        while queue.pop() is not None:
            pass
        pop_us.append(1e6 * (time.process_time() - began) / left)
    return {
        "order": order.value,
        "ranked_anew_ms": median(ranked_ms),
        "push_us": median(push_us),
        "pop_us": median(pop_us),
    }


def main() -> int:
    """Print a line for each order, and write the result; 1 where a limit is exceeded."""
    rows = [measured(order) for order in Order]
    failed = False
    for row in rows:
        too_slow = float(row["ranked_anew_ms"]) > LIMIT_MS or float(row["push_us"]) + float(row["pop_us"]) > LIMIT_US
        failed |= too_slow
        print(
            f"{row['order']:5} {REQUESTS} ranked anew in {row['ranked_anew_ms']:.1f} ms, push {row['push_us']:.1f} us, "
            f"pop {row['pop_us']:.1f} us{'   MISSED' if too_slow else ''}"
        )
    write_result("laxity", {"requests": REQUESTS, "rows": rows})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
