"""``wattshift nodes partition``, and slices in the table of nodes; against gateway and telemetry as processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, CliError
from services.cli.jobs.specs import SpecOptions, spec_of
from services.cli.main import app
from services.cli.site.slices import slice_sizes, slice_words
from services.contracts.nodes import DeviceInfo
from tests.support.control_plane import JOIN_TOKEN, FakeAgent
from tests.support.services import services


@pytest.mark.parametrize(("text", "sizes"), [("3g,2g,2g", [2, 2, 3]), ("7g", [7]), (" 1g, 4g", [4, 1]), ("whole", [])])
def test_slices_are_named_in_any_order(text: str, sizes: list[int]) -> None:
    assert slice_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [("5g", "no slice '5g'"), ("4g,4g", "do not fit"), ("", "no slice ''"), ("3g 2g", "no slice '3g 2g'")],
)
def test_slices_that_no_gpu_has_are_one_sentence(text: str, said: str) -> None:
    with pytest.raises(CliError, match=said) as refused:
        slice_sizes(text)
    assert refused.value.exit_code == EXIT_USAGE


def test_submit_asks_for_a_slice_and_names_the_option_that_is_wrong() -> None:
    assert spec_of(SpecOptions(slice="2g", memory="10"), ["x"], "x", {}).gpus.model_dump(exclude_none=True) == {
        "min": 1,
        "max": 1,
        "step": 1,
        "slice": "2g",
        "memory_gib": 10,
    }
    with pytest.raises(CliError, match="--slice"):
        spec_of(SpecOptions(slice="5g"), ["x"], "x", {})
    with pytest.raises(CliError, match="a job on a slice has one"):
        spec_of(SpecOptions(slice="2g", gpus="2"), ["x"], "x", {})


def a_node(*partitions: dict[str, Any], sevenths: tuple[int, ...] = ()) -> dict[str, Any]:
    known = {"model": "A100", "memory_gib": 40.0, "power_limit_w": 400.0}
    devices = [DeviceInfo(index=index, uuid=f"GPU-{index}", **known) for index in (0, 1)]
    devices += [
        DeviceInfo(index=1_024 + place, uuid=f"MIG-{place}", parent=0, start=place, sevenths=size, **known)
        for place, size in enumerate(sevenths)
    ]
    return {"devices": [each.model_dump(mode="json") for each in devices], "partitions": list(partitions)}


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        (a_node(), ""),
        (a_node(sevenths=(3, 3)), "0: 3g 3g"),
        (a_node({"gpu": 0, "sizes": [3, 3], "state": "applied", "owner": None}, sevenths=(3, 3)), "0: 3g 3g"),
        (a_node({"gpu": 1, "sizes": [7], "state": "failed", "owner": None}), "1: whole [red]failed: 7g[/]"),
        (
            a_node({"gpu": 0, "sizes": [], "state": "busy", "owner": "f"}, sevenths=(7,)),
            "0: 7g [yellow]busy: whole[/] [cyan]for f[/]",
        ),
        (a_node({"gpu": 1, "sizes": [], "state": "applied", "owner": None}), ""),
    ],
)
def test_a_node_shows_how_its_gpus_are_cut_and_what_is_still_to_be_done(node: dict[str, Any], shown: str) -> None:
    assert slice_words(node) == shown


@pytest.fixture(scope="module")
def address(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        services(
            tmp_path_factory.mktemp("slices"), database_url, redis_url, WATTSHIFT_NODE_JOIN_TOKEN=JOIN_TOKEN
        ) as found,
        found.started("services.admission.app"),
        found.started("services.telemetry.app"),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found


async def test_an_operator_cuts_a_gpu_and_sees_it(
    address: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WATTSHIFT_URL", address.urls["GATEWAY"])
    monkeypatch.setenv("WATTSHIFT_API_KEY", address.admin_key())
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> str:
        assert (app(["nodes", *words], standalone_mode=False) or 0) == 0
        return capsys.readouterr().out

    async with httpx.AsyncClient() as http:
        agent = FakeAgent(http, "n0", gpus=2, base_url=address.urls["TELEMETRY"])
        agent.can_partition()
        agent.registration["devices"][1]["can_partition"] = False
        await agent.register()
        await agent.beat()
        assert "GPU 0 of n0 is to be cut into 2g 2g 3g when no gang runs" in run("partition", "n0", "0", "3g,2g,2g")
        assert "pending: 2g 2g 3g" in run()
        agent.cut(0, [2, 2, 3])
        await agent.register()
        agent.said_of(0, 1, "applied", [2, 2, 3])
        await agent.beat()
    assert json.loads(run("partition", "n0", "0", "2g,3g,2g", "--json"))["revision"] == 1, "it is so already"
    assert "0: 2g 2g 3g" in run()
    for words, code in ((("n0", "1", "7g"), EXIT_REFUSED), (("n0", "2", "7g"), EXIT_NOT_FOUND)):
        with pytest.raises(CliError) as refused:
            run("partition", *words)
        assert refused.value.exit_code == code
