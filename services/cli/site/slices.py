"""``wattshift nodes partition``: cut a GPU into MIG slices; and how the slices of nodes are shown."""

from typing import Annotated, Any

import typer

from services.cli import output
from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, AsJson, CliError
from services.core.domain import mig
from services.core.domain.errors import DomainError
from services.core.domain.mig import placed, sevenths_of, slice_name

WHOLE = "whole"


def partition(
    node: str,
    gpu: Annotated[int, typer.Argument(help="Index of the GPU on its node.")],
    slices: Annotated[str, typer.Argument(help="As 3g,2g,2g in any order, or the word whole.")],
    as_json: AsJson = False,
) -> None:
    """Cut a GPU into MIG slices, or make it whole again, as soon as no gang runs on it."""
    body = {"sizes": slice_sizes(slices)}
    answer = Gateway().call("PUT", f"/v1/nodes/{node}/gpus/{gpu}/partition", body=body)
    cut = " ".join(map(slice_name, answer["sizes"]))
    wanted = f"cut into {cut}" if cut else "made whole"
    output.tell(
        answer,
        as_json,
        f"GPU {gpu} of {node} is {'' if answer['state'] == 'applied' else 'to be '}{wanted}"
        + ("" if answer["state"] == "applied" else " when no gang runs on it: `wattshift nodes` shows when it is"),
    )


def slice_sizes(text: str) -> list[int]:
    """Return the sizes that words such as ``3g,2g,2g`` name, in sevenths and in the order of their places."""
    names = [] if text == WHOLE else [name.strip() for name in text.split(",")]
    try:
        return [place.sevenths for place in placed([sevenths_of(name) for name in names])]
    except DomainError as error:
        raise CliError(f"slices: {error}", EXIT_USAGE) from None


def slice_words(node: dict[str, Any]) -> str:
    """Return how a node's GPUs are cut, one per line, and the cut wanted for those where it differs."""
    of_gpu: dict[int, list[str]] = {}
    for device in sorted(node["devices"], key=lambda device: device["index"]):
        if device.get("parent") is not None:
            of_gpu.setdefault(device["parent"], []).append(slice_name(device.get("sevenths", mig.WHOLE)))
    wanted = {each["gpu"]: each for each in node.get("partitions", [])}
    lines: list[str] = []
    for gpu in sorted({*of_gpu, *(gpu for gpu, each in wanted.items() if each["state"] != "applied" or each["owner"])}):
        words = [f"{gpu}:", *of_gpu.get(gpu, [WHOLE])]
        if each := wanted.get(gpu):
            if each["state"] != "applied":
                color = "red" if each["state"] == "failed" else "yellow"
                sizes = " ".join(map(slice_name, each["sizes"])) or WHOLE
                words.append(f"[{color}]{each['state']}: {sizes}[/]")
            words += [f"[cyan]for {each['owner']}[/]"] if each["owner"] else []
        lines.append(" ".join(words))
    return "\n".join(lines)
