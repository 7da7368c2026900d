"""Commands that are the lab's: what their former names answer, and what is said where the lab is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from services.cli import plugins
from services.cli.errors import CliError
from services.cli.main import ROOM_OF, app
from services.cli.plugins import add_commands


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


def test_the_lab_adds_its_commands_where_it_is_installed() -> None:
    commands = typer.Typer()

    add_commands(commands, ["lab", "experiment"], ROOM_OF)

    (group,) = (each for each in commands.registered_groups if each.name == "lab")
    assert {each.callback.__name__ for each in group.typer_instance.registered_commands if each.callback} == {
        *("experiment", "inference", "serving")
    }


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
