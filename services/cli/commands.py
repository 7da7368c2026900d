"""How commands are declared: in groups, with options that several share."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from services.contracts.codes import ProblemCode

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_REFUSED = 4
EXIT_UNAVAILABLE = 5
EXIT_DEGRADED = 6


class CliError(Exception):
    """A failure: one line for the user, lines to type below it, an exit code, and the problem's code if any."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED, code: ProblemCode | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Show it again every two seconds until Ctrl-C.", show_default=False)
]
Command = Callable[..., Any]


class Group(typer.Typer):
    """A group of commands; its bare name does what ``alone`` does, if that is given."""

    def __init__(self, app: typer.Typer, name: str, words: str, alone: Command | None = None, **options: Any) -> None:
        super().__init__(help=words, invoke_without_command=bool(alone), no_args_is_help=not alone, **options)
        self._endings = f"-{name}", f"-{name.removesuffix('s')}"
        if alone is not None:
            self.callback()(_unless_another(alone))
        app.add_typer(self, name=name)

    def add(self, *commands: Command, **named: Command) -> None:
        """Add commands by their functions' names, such as ``create_key`` for ``keys create``, or by others."""
        for command in commands:
            name = command.__name__.replace("_", "-")
            for ending in self._endings:
                name = name.removesuffix(ending)
            self.command(name)(command)
        for name, command in named.items():
            self.command(name)(command)


def _unless_another(command: Command) -> Command:
    @wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        if not context.invoked_subcommand:
            command(**given)

    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return _declared(run, [context, *signature(command, eval_str=True).parameters.values()])


def with_records(command: Command) -> Command:
    """Return a command whose parameters that are dataclasses give way to their fields, each declared as an option."""
    parameters = signature(command, eval_str=True).parameters.values()
    records: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, record in records.items():
            given[name] = record(**{each.name: given.pop(each.name) for each in fields(record)})
        command(**given)

    options = {name: signature(record, eval_str=True).parameters.values() for name, record in records.items()}
    return _declared(run, [one for each in parameters for one in options.get(each.name, [each])])


def _declared(run: Command, parameters: Iterable[Parameter]) -> Command:
    by_keyword = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    run.__annotations__ = {each.name: each.annotation for each in by_keyword}
    run.__signature__ = Signature(by_keyword)  # pyright: ignore[reportFunctionMemberAccess]
    return run
