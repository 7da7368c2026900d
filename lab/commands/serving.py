"""``wattshift lab serving``: what queues, clocks and plans would have done with past LLM requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError
from services.cli.output import console, duration, print_json, table
from services.cli.values import json_document
from services.contracts.invalid import first_error
from services.core.policies.freesh.laxity import PREEMPTION_MARGIN_S


def serving(
    requests: Annotated[
        str,
        typer.Option(
            help="A bundled trace (azure-2023-conv); a CSV file: TIMESTAMP,ContextTokens,GeneratedTokens or "
            "arrived_at,input_tokens,output_tokens; or Mooncake's JSON lines. Also compressed (.gz)."
        ),
    ],
    policy: Annotated[
        Literal["llf", "fcfs", "fcfs-strict", "edf", "srtf"],
        typer.Option(help="Order of waiting requests; fcfs-strict has one queue for all classes."),
    ] = "llf",
    pools: Annotated[
        Path | None, typer.Option(help="A pool as for `pools set`, with gpus in each place; by default the paper's.")
    ] = None,
    frequency: Annotated[
        Literal["miad", "fixed", "learned"], typer.Option(help="How clocks are set: fixed is the highest.")
    ] = "miad",
    clocks_see: Annotated[
        Literal["client", "server"],
        typer.Option(help="Latencies that clocks are set by: from arrival, or from when an instance got the request."),
    ] = "client",
    qps_scale: Annotated[
        float, typer.Option(help="Multiply the requests by this; plans are made for the trace as it is.")
    ] = 1.0,
    plan_qps_scale: Annotated[float, typer.Option(help="Multiply the requests that plans are made for.")] = 1.0,
    carbon: Annotated[
        Path | None,
        typer.Option(help="CSV: a column of times, then gCO2/kWh by place or zone; by default the paper's day."),
    ] = None,
    carbon_hour: Annotated[float, typer.Option(help="Hour of the carbon data at which the requests begin.")] = 0.0,
    objective: Annotated[
        Literal["carbon", "energy", "cost"] | None, typer.Option(help="Of the plans; by default the pool's.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Plan with this partition only.")] = None,
    forecast: Annotated[
        Literal["perfect", "last", "learned"], typer.Option(help="Predicted peaks that plans are made for.")
    ] = "perfect",
    replan: Annotated[bool, typer.Option(help="Plan every half hour, not only the first.")] = True,
    classify: Annotated[bool, typer.Option(help="Send requests to the instances of their class.")] = True,
    preempt: Annotated[bool, typer.Option(help="Let waiting requests take the place of others in service.")] = True,
    preempt_margin_s: Annotated[
        float, typer.Option(help="By how much less laxity they must have; the router's by default, the paper's is 0.")
    ] = PREEMPTION_MARGIN_S,
    start_s: Annotated[float, typer.Option(help="How long an instance takes to start after a plan, seconds.")] = 0.0,
    late_last: Annotated[
        bool, typer.Option(help="Have requests that cannot be in time any more wait behind the others, as the router.")
    ] = False,
    length_mae: Annotated[
        float, typer.Option(help="Mean absolute error of predicted output lengths, tokens; the paper's is 110.")
    ] = 110.0,
    miad_factor: Annotated[float, typer.Option(help="MIAD's factor.")] = 2.0,
    miad_step_mhz: Annotated[float, typer.Option(help="MIAD's step, MHz.")] = 100.0,
    prefill: Annotated[
        Literal["fixed", "length"],
        typer.Option(
            help="A prefill takes the profile's TTFT, or that times its prompt's length over its class's mean."
        ),
    ] = "fixed",
    kv_kib_per_token: Annotated[
        float,
        typer.Option(
            help="KV cache of a token, KiB, which limits what an instance holds (Llama-3-70B: 320); 0: no limit."
        ),
    ] = 0.0,
    weights_gib: Annotated[
        float, typer.Option(help="Memory that the model's weights take of the KV cache; Llama-3-70B by default.")
    ] = 131.4,
    prefix_cache_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of prompts that each instance keeps, for --prefill length and a trace with hash_ids."
        ),
    ] = 0,
    placement: Annotated[
        Literal["weights", "carbon"],
        typer.Option(help="Which instance serves: in proportion to weights, or the router's choice by carbon in time."),
    ] = "weights",
    seed: Annotated[int, typer.Option(help="Equal input and equal seed give equal results.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve the LLM requests of a trace in virtual time, and show energy, carbon and latencies."""
    from pydantic import ValidationError

    from lab.serving.plans import Forecast
    from lab.serving.requests import BUNDLED
    from lab.serving.run import STRICT, ServingRun
    from lab.serving.simulation import ClocksSee, Frequency, Placement, Prefill, ServingOptions
    from lab.serving.site import papers_pools
    from services.contracts.serving import PoolSpec
    from services.core.domain.errors import DomainError
    from services.core.domain.serving import MiadConfig
    from services.core.policies.freesh.laxity import Order

    if requests not in BUNDLED and not Path(requests).is_file():
        raise CliError(f"there is no trace {requests!r}: no such file; bundled: {', '.join(BUNDLED)}", EXIT_NOT_FOUND)
    if carbon is not None and not carbon.is_file():
        raise CliError(f"there is no file {str(carbon)!r}", EXIT_NOT_FOUND)
    try:
        spec = papers_pools() if pools is None else PoolSpec.model_validate(json_document(pools))
    except ValidationError as error:
        raise CliError(f"{pools}: {first_error(error, whole='the pool')}", EXIT_USAGE) from None
    try:
        run = ServingRun(
            requests=requests,
            pools=spec if objective is None else PoolSpec.model_validate(spec.model_dump() | {"objective": objective}),
            carbon=carbon,
            carbon_hour=carbon_hour,
            qps_scale=qps_scale,
            plan_qps_scale=plan_qps_scale,
            forecast=Forecast(forecast),
            partition=partition,
            replan=replan,
            options=ServingOptions(
                order=Order(policy.removesuffix("-strict")),
                one_queue=policy == STRICT,
                clocks_see=ClocksSee(clocks_see),
                start_s=start_s,
                preempt_margin_s=preempt_margin_s,
                frequency=Frequency(frequency),
                preempt=preempt,
                late_last=late_last,
                classify=classify,
                length_mae=length_mae,
                miad=MiadConfig(miad_factor, miad_step_mhz),
                seed=seed,
                prefill=Prefill(prefill),
                kv_kib_per_token=kv_kib_per_token,
                weights_gib=weights_gib,
                prefix_cache_tokens=prefix_cache_tokens,
                placement=Placement(placement),
            ),
        )
        result = run.simulate()
    except ValidationError as error:
        raise CliError(f"--objective {objective}: {first_error(error, whole='the pool')}", EXIT_USAGE) from None
    except DomainError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    title = f"{result['trace']}: {result['requests']} requests, {result['policy']}, clocks {result['frequency']}"
    right = (">Energy", ">Carbon", ">Violations", ">Mean", ">p50", ">p90", ">p99", ">TTFT", ">TBT", ">Jain", ">Took")
    shown = table(*right, title=title)
    shown.add_row(
        f"{result['energy_wh']:.0f} Wh",
        f"{result['carbon_kg']:.3f} kg",
        f"{100 * result['violation_rate']:.2f} %",
        *(f"{result[f'e2e_{name}_s']:.2f} s" for name in ("mean", "p50", "p90", "p99")),
        f"{result['ttft_mean_ms']:.0f} ms",
        "-" if result["tbt_mean_ms"] is None else f"{result['tbt_mean_ms']:.1f} ms",
        f"{result['jain']:.2f}",
        f"{result['wall_s']:.1f} s",
    )
    console.print(shown)
    for plan in result["plans"]:
        instances = ", ".join(
            f"{each['count']} {each['mode']} for {each['request_class'] or 'nothing'} in {each['place']}"
            for each in plan["instances"]
        )
        console.print(f"after {duration(plan['from_s'])}: partition {plan['partition']}: {instances}")
    if result["waited_for_memory"]:
        console.print(f"{result['waited_for_memory']} requests waited for memory of an instance that had a place")
    if result["prefix_hit_share"] is not None:
        console.print(f"{100 * result['prefix_hit_share']:.1f} % of the prompts' tokens were in a prefix cache")
    if result["unserved"]:
        console.print(f"{result['unserved']} requests did not end")
    for note in result.get("notes", ()):
        console.print(f"[dim]{escape(note)}[/]")
