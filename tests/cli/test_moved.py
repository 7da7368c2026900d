"""Commands that are the lab's: what their former names answer, and what is said where the lab is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lab.recipes import ADDED
from services.cli import plugins
from services.cli.commands import CliError
from services.cli.main import ROOM_OF, app
from services.cli.plugins import add_commands
from services.simulator import catalogue as catalogues


@pytest.fixture
def without_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(group: str, kind: type) -> Iterator[object]:
        return iter(())

    monkeypatch.setattr(plugins, "load_plugins", none)


@pytest.mark.parametrize("name", ["experiment", "inference", "serving"])
def test_a_former_name_answers_with_the_new_one(name: str) -> None:
    with pytest.raises(CliError, match=f"^`simulate {name}` is now `wattshift lab {name}`$") as caught:
        app(["simulate", name, "x.toml", "--out", "there", "-v"], standalone_mode=False)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["allocation", "partition", "placement"])
def test_a_single_plan_is_asked_of_the_lab(name: str) -> None:
    with pytest.raises(CliError, match=rf"^`plan {name}` is now `wattshift lab {name}`$"):
        app(["plan", name, "--model", "vgg19", "--gpus", "8"], standalone_mode=False)


def test_the_demonstration_is_started_as_a_checkout_is() -> None:
    with pytest.raises(CliError, match=r"^`demo` is now `\./run`$"):
        app(["demo", "--exit"], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("carbon forecast", ["carbon", "forecast", "--zone", "DE"]),
        ("fit", ["fit", "throughput", "points.csv"]),
        ("profile inference", ["profile", "inference", "x.json", "--node", "a"]),
    ],
)
def test_a_former_group_answers_with_the_new_one(name: str, words: list[str]) -> None:
    now = name.removeprefix("carbon ")
    with pytest.raises(CliError, match=f"^`{name}` is now `wattshift lab {now}`$") as caught:
        app(words, standalone_mode=False)
    assert caught.value.exit_code == 2


def test_what_is_no_command_is_a_zone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(_: Any, path: str, **_query: Any) -> dict[str, Any]:
        asked.append(path)
        return {"items": []}

    monkeypatch.setattr("services.cli.client.Gateway.__init__", lambda _: None)
    monkeypatch.setattr("services.cli.client.Gateway.get", answer)
    for arguments in (["carbon", "--json"], ["carbon", "DE", "--json"], ["carbon", "show", "DE", "--json"]):
        app(arguments, standalone_mode=False)
    capsys.readouterr()
    assert asked == ["/v1/carbon/zones", *["/v1/carbon/DE/current", "/v1/carbon/DE/forecast"] * 2]


def test_the_lab_adds_its_commands_where_it_is_installed() -> None:
    commands = typer.Typer()

    add_commands(commands, ["lab", "experiment"], ROOM_OF)

    (group,) = (each for each in commands.registered_groups if each.name == "lab")
    assert {each.callback.__name__ for each in group.typer_instance.registered_commands if each.callback} == {
        *("allocation", "experiment", "forecast", "inference", "partition", "placement", "serving")
    }
    assert {each.name for each in group.typer_instance.registered_groups} == {"fit", "profile"}


@pytest.mark.usefixtures("without_the_lab")
def test_without_the_lab_its_command_says_what_to_install() -> None:
    with pytest.raises(CliError, match=r"wattshift-lab, .*pip install \./lab") as caught:
        add_commands(app, ["lab", "experiment", "x.toml"], ROOM_OF)
    assert caught.value.exit_code == 2
    add_commands(app, ["--cluster", "lab", "jobs"], ROOM_OF)
    add_commands(app, ["labs"], ROOM_OF)
    add_commands(app, [], ROOM_OF)


def test_no_package_is_looked_for_when_the_command_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(group: str, kind: type) -> Iterator[object]:
        raise AssertionError(group)

    monkeypatch.setattr(plugins, "load_plugins", none)

    for arguments in (["jobs"], ["--cluster", "x", "submit", "lab"], ["simulate", "training"]):
        add_commands(app, arguments, ROOM_OF)


@pytest.fixture
def with_our_traces_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(catalogues, "load_plugins", lambda group, kind: iter(()))
    catalogues.catalogue.cache_clear()
    yield
    catalogues.catalogue.cache_clear()


@pytest.mark.usefixtures("with_our_traces_alone")
@pytest.mark.parametrize(
    "options",
    [
        ("--jobs", "a-srpt"),
        ("--jobs", "green-day", "--recipe", "powerflow-strong"),
        ("--jobs", "{file}", "--format", "philly"),
    ],
)
def test_without_the_lab_its_traces_and_recipes_say_what_to_install(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n")
    words = [each.format(file=file) for each in options]

    with pytest.raises(CliError, match=r"is in the package wattshift-lab, .*pip install \./lab"):
        app(["simulate", "training", "--policy", "las", "--carbon", "GB", *words], standalone_mode=False)


@pytest.mark.usefixtures("with_our_traces_alone")
def test_a_file_that_only_the_lab_reads_is_not_known_without_it(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n")

    with pytest.raises(CliError, match=r"not a known job trace .* known: sacct, wattshift; .* wattshift-lab"):
        app(["simulate", "training", "--policy", "las", "--carbon", "GB", "--jobs", str(file)], standalone_mode=False)


@pytest.mark.usefixtures("with_our_traces_alone")
def test_without_the_lab_a_predictor_that_learns_is_not_known() -> None:
    words = ["--policy", "las", "--jobs", "green-day", "--carbon", "GB", "--days", "0.05", "--predictor", "forest"]

    with pytest.raises(CliError, match=r"unknown predictor 'forest'; known: perfect, none; .* wattshift-lab"):
        app(["simulate", "training", *words], standalone_mode=False)


def test_every_name_that_the_lab_adds_is_answered_where_it_is_missing() -> None:
    added = {*ADDED.jobs, *(each.name for each in (*ADDED.formats, *ADDED.recipes))}

    assert added == catalogues.IN_LAB
