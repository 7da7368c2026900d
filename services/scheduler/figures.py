"""What the scheduler shows at ``/metrics`` beside its counters: the present queue, gangs and commands."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

from prometheus_client.metrics_core import Metric
from redis.asyncio import Redis

from services.contracts.streams import HINTS_STREAM, command_stream
from services.db.database import Database
from services.db.figures import pool_of
from services.kit.metrics import Metrics, gauge, single
from services.scheduler.grid.orders import shown
from services.scheduler.loop import Scheduler
from services.scheduler.repository import figures
from services.scheduler.repository.orders import drawn_w as drawn_before_w
from services.scheduler.repository.orders import live as live_orders
from services.scheduler.settings import SchedulerSettings

DRAWN_S = 120.0  #: Over so long what is drawn under an order is shown


def show_figures(
    metrics: Metrics, database: Database, redis: Redis, loop: Scheduler, settings: SchedulerSettings
) -> None:

    async def read_cluster() -> Iterable[Metric]:
        async with database.connection() as connection:
            counts = await figures.counts(connection)
            tenants = [each for each in await figures.shares(connection) if each.guaranteed_gpus]
            state = await figures.state(connection)
            orders, drawn_w = [shown(row) for row in await live_orders(connection)], dict[str | None, float | None]()
            for zone in {order.zone for order in orders}:
                drawn_w[zone] = await drawn_before_w(connection, datetime.now(UTC), zone, DRAWN_S)
        active_s = state.last_active_at.timestamp() if state and state.last_active_at else None
        return [
            gauge(
                "wattshift_jobs",
                "Jobs that have not ended, and the reason they are in their state.",
                ["state", "reason"],
                counts["jobs"],
            ),
            gauge(
                "wattshift_free_gpus",
                "GPUs that are free for training, on nodes that take work.",
                [],
                [((), loop.free_gpus)] if loop.level_rooms else [],
            ),
            gauge(
                "wattshift_largest_gang_gpus",
                "The largest gang that could start now within one domain of a level of the network.",
                ["level"],
                [((each.level,), each.free) for each in loop.level_rooms],
            ),
            gauge("wattshift_gangs", "Gangs that hold GPUs.", ["state"], counts["gangs"]),
            gauge("wattshift_gang_gpus", "GPUs that gangs hold.", ["state"], counts["gpus"]),
            gauge(
                "wattshift_tenant_gpus",
                "GPUs of tenants that are guaranteed some: how many those are, and how many they hold and borrow.",
                ["tenant", "kind"],
                [
                    ((each.tenant_id, kind), gpus)
                    for each in tenants
                    for kind, gpus in (
                        ("guaranteed", each.guaranteed_gpus),
                        ("held", each.gpus),
                        ("borrowed", max(each.gpus - each.guaranteed_gpus, 0)),
                    )
                ],
            ),
            gauge(
                "wattshift_nodes_powered",
                "Nodes that were ever powered down, by what they are now.",
                ["state"],
                counts["nodes"],
            ),
            gauge(
                "wattshift_grid_orders",
                "Orders of the grid that are announced or in force, and those whose rebound is kept small.",
                ["state"],
                [((each,), count) for each, count in Counter(order.state.value for order in orders).items()],
            ),
            gauge(
                "wattshift_grid_order_limit_watts",
                "What an order lets its zone draw now; without a zone, the cluster.",
                ["order", "zone"],
                [((each.id, each.zone or ""), each.limit_w) for each in orders if each.limit_w is not None],
            ),
            gauge(
                "wattshift_grid_order_drawn_watts",
                "What is drawn there, by the last two minutes of the ledger.",
                ["order", "zone"],
                [((each.id, each.zone or ""), drawn_w[each.zone]) for each in orders],
            ),
            gauge(
                "wattshift_grid_order_baseline_watts",
                "What was drawn there before it.",
                ["order", "zone"],
                [((each.id, each.zone or ""), each.baseline_w) for each in orders if each.baseline_w is not None],
            ),
            single(
                "wattshift_scheduler_longest_wait_seconds",
                "How long the job has been queued that has been so for longest; none while nothing is queued.",
                state and state.longest_wait_s,
            ),
            single(
                "wattshift_outbox_commands", "Commands to nodes that Redis does not have yet.", state and state.commands
            ),
            single(
                "wattshift_outbox_lag_seconds",
                "How old the oldest of these commands is; 0 while there is none.",
                state and (state.oldest_command_s or 0.0),
            ),
            single(
                "wattshift_scheduler_last_active_round_timestamp_seconds",
                "When an active round was last held.",
                active_s,
            ),
            gauge(
                "wattshift_scheduler_policy_info",
                "The policy in force.",
                ["policy"],
                [((state.policy,), 1.0)] if state else [],
            ),
        ]

    async def read_loop() -> Iterable[Metric]:
        return [
            single(
                "wattshift_scheduler_leads", "1 for the scheduler that decides, 0 for one that stands by.", loop.leads
            ),
            single(
                "wattshift_scheduler_turn_age_seconds", "How long ago the loop last began a turn.", loop.since_turn_s
            ),
            single(
                "wattshift_scheduler_round_interval_seconds", "Time between active rounds.", settings.round_interval_s
            ),
        ]

    async def read_streams() -> Iterable[Metric]:
        nodes = await database.run(figures.nodes_up)
        hints, unread = await _streams(redis, nodes)
        return [
            single("wattshift_hints_stream_entries", "Messages kept on the stream that wakes the scheduler.", hints),
            single(
                "wattshift_command_streams_unread_entries",
                "Commands on nodes' streams that no agent has written down yet.",
                unread,
            ),
        ]

    metrics.add("cluster", read_cluster)
    metrics.add("loop", read_loop)
    metrics.add("streams", read_streams)
    metrics.add("database", pool_of(database))


async def _streams(redis: Redis, nodes: Iterable[str]) -> tuple[int, int]:
    """Return the number of entries in the stream of hints, and in all nodes' streams together."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.xlen(HINTS_STREAM)
        for node in nodes:
            pipeline.xlen(command_stream(node))
        hints, *found = await pipeline.execute()
    return hints, sum(found)
