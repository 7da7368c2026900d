"""What installed packages add to the command line: policies, for commands that simulate, and commands."""

from collections.abc import Container, Mapping, Sequence

import typer

from services.cli.commands import EXIT_USAGE, CliError
from services.kit.plugins import PluginError, load_plugins

LAB = "lab"  #: The command of the package wattshift-lab


def add_plugins() -> None:
    """Add the policies of installed packages to those that may be named; ``CliError`` if one of them cannot be used."""
    from services.kit.policies import load_policies

    try:
        load_policies()
    except PluginError as error:
        raise CliError(str(error), EXIT_USAGE) from None


def add_moved(group: typer.Typer, now: Mapping[str, str]) -> None:
    """Have names of former releases answer with what to type ``now``."""

    def moved(context: typer.Context) -> None:
        before = context.command_path.removeprefix(context.find_root().command_path).strip()
        raise CliError(f"`{before}` is now `{now[context.command.name or '']}`", EXIT_USAGE)

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in now:
        group.command(name, hidden=True, context_settings=anything, add_help_option=False)(moved)


def add_commands(app: typer.Typer, arguments: Sequence[str], ours: Container[str]) -> None:
    """Add the command groups of installed packages, unless the arguments name one of ``ours``.

    Raises:
        CliError: One of them cannot be used, or ``lab`` is asked for and not installed.
    """
    after = arguments[2:] if arguments[:1] == ["--cluster"] else arguments
    asked = next((each for each in after if not each.startswith("-")), None)
    if asked is not None and asked in ours:
        return
    try:
        found = {plugin.name: plugin.value for plugin in load_plugins("wattshift.commands", typer.Typer)}
    except PluginError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    if asked == LAB and LAB not in found:
        raise CliError(
            "`wattshift lab` is in the package wattshift-lab, which is not installed here; in a checkout of this "
            "release: pip install ./lab",
            EXIT_USAGE,
        )
    for name, group in found.items():
        app.add_typer(group, name=name)
