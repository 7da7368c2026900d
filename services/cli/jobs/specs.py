"""Job specs: read from YAML and JSON files, and made from the options of ``wattshift submit``."""

import json
import os
import re
import shlex
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import ValidationError

from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.copied_output import copying
from services.cli.jobs.forward import staying
from services.cli.jobs.scripts import needs_shell
from services.cli.jobs.sources import LocalSources
from services.cli.values import duration_s, filled, pair, text_of, time_of, words_of
from services.contracts.invalid import NAME_PATTERN, explained, field_of, first_error
from services.contracts.jobs import JobSpec
from services.contracts.secrets import SecretUse
from services.core.domain.dependencies import Condition
from services.kit.text import decimal

CAPTURED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
"""Variables of the caller that a job gets unless it runs in a container: they make its ``python3`` the caller's."""

SPEC_SUFFIXES = (".json", ".yaml", ".yml")


of_job, of_run, of_sending = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("What the job is", "How it may run", "Submitting")
)


@dataclass(frozen=True)
class SpecOptions:
    """What the options say about one job; None means not given."""

    name: Annotated[str | None, of_job(help="By default the script's or program's.")] = None
    gpus: Annotated[
        str | None, of_job(help="N, MIN-MAX or MIN-MAX:STEP, and @ASKED for the size you would ask for; 1 by default.")
    ] = None
    model: Annotated[str | None, of_job(help="GPU model, as nodes report it.")] = None
    memory: Annotated[str | None, of_job(help="Least memory of each GPU, GiB.")] = None
    slice: Annotated[str | None, of_job(help="Run on a MIG slice of this size, 1g, 2g, 3g, 4g or 7g.")] = None
    zone: Annotated[str | None, of_job(help="Grid zone to stay in, as with data that are there.")] = None
    within: Annotated[
        str | None, of_job(metavar="LEVEL", help="Level of the network that all its GPUs must share, such as rack.")
    ] = None
    near: Annotated[str | None, of_job(metavar="LEVEL", help="The same, but only where that does not delay it.")] = None
    container: Annotated[str | None, of_job(help="Container image to run in.", metavar="IMAGE")] = None
    workdir: Annotated[Path | None, of_job(help="Folder to run in; by default the present one.")] = None
    env: Annotated[
        list[str] | None,
        of_job(
            metavar="NAME[=VALUE]",
            help="A variable for the job, by default with its value here; may be repeated; '*' is every one. PATH, "
            "VIRTUAL_ENV and CONDA_PREFIX are always passed on, except to containers.",
        ),
    ] = None
    clean_env: Annotated[bool | None, of_job("--clean-env", help="Pass on what --env names alone, and no PATH.")] = None
    output: Annotated[
        str | None,
        of_job(
            metavar="FILE", help="Write what the job prints to a file too; its name may have Slurm's %j, %x, %A, %a."
        ),
    ] = None
    error: Annotated[str | None, of_job(metavar="FILE", help="As --output, for standard error alone.")] = None
    env_file: Annotated[list[Path] | None, of_job(help="File with lines NAME=VALUE; may be repeated.")] = None
    upload: Annotated[
        Path | None,
        of_job(metavar="FOLDER", help="Send the folder's files that git does not ignore along; the job runs in them."),
    ] = None
    results: Annotated[
        list[str] | None,
        of_job(
            metavar="PATH",
            help="With --upload or --git, and --wait or --follow: bring this back when the job ends; may be repeated.",
        ),
    ] = None
    git: Annotated[
        str | None, of_job(metavar="URL[@REVISION]", help="Run in the files of a repository that nodes reach.")
    ] = None
    git_secret: Annotated[
        str | None, of_job(metavar="NAME", help="Secret with the token or SSH key of the repository.")
    ] = None
    secret: Annotated[
        list[str] | None,
        of_job(
            metavar="NAME[=VARIABLE]",
            help="A secret as a variable, by default of the same name; may be repeated. See `wattshift secrets`.",
        ),
    ] = None
    secret_file: Annotated[
        list[str] | None,
        of_job(metavar="NAME[=FILE]", help="A secret as a file in $WATTSHIFT_SECRETS_DIR; may be repeated."),
    ] = None
    checkpoint_dir: Annotated[
        Path | None, of_job(help="Kept between restarts; by default a folder of the job's own.")
    ] = None
    work: Annotated[str | None, of_job(metavar="TOTAL:UNIT", help="30000:steps, 90:epochs or 1e6:samples.")] = None
    progress: Annotated[str | None, of_job(metavar="SOURCE", help="file (the default), http, none or log:PATTERN.")] = (
        None
    )
    processes: Annotated[
        str | None, of_job(metavar="per_gpu|per_node", help="How many copies of the command start.")
    ] = None
    batch: Annotated[
        str | None,
        of_job(
            metavar="SAMPLES",
            help="Samples per step of the whole gang: 256; or 256-4096: a policy may choose, and the code reads it.",
        ),
    ] = None
    family: Annotated[str | None, of_job(help="vision, language, speech or recommendation.")] = None
    notify: Annotated[
        str | None,
        of_job(
            metavar="EVENTS",
            help="Post messages to the tenant's webhooks: started, ended or failed, separated by commas.",
        ),
    ] = None
    project: Annotated[str | None, of_job(help="For reports and filters.")] = None
    label: Annotated[list[str] | None, of_job(metavar="KEY=VALUE", help="May be repeated.")] = None
    time: Annotated[str | None, of_run(metavar="DURATION", help="Longest run: 90s, 15m, 6h, 06:00:00, 1-06:00:00.")] = (
        None
    )
    deadline: Annotated[str | None, of_run(metavar="TIME", help="2026-03-01T18:00, or +6h from now.")] = None
    flexible: Annotated[
        str | None, of_run(metavar="DURATION", help="How long it may be delayed for greener hours.")
    ] = None
    priority: Annotated[int | None, of_run(help="-100 to 100; higher goes first.")] = None
    preemptible: Annotated[
        bool | None, of_run("--preemptible/--not-preemptible", help="Whether it may be stopped.")
    ] = None
    may_share_gpu: Annotated[
        bool | None, of_run("--may-share-gpu", help="It may share its GPU with another job that may; needs --memory.")
    ] = None
    flex: Annotated[
        int | None, of_run(metavar="PERCENT", help="How much slower orders of the grid may make it: 0, 10, 25 or 50.")
    ] = None
    cells: Annotated[
        str | None, of_run(metavar="CELLS", help="Other installations that may run it: any, or names and commas.")
    ] = None
    may_move: Annotated[
        bool | None, of_run("--may-move", help="It may move between cells while it runs; they share --checkpoint-dir.")
    ] = None
    grace: Annotated[str | None, of_run(metavar="DURATION", help="From SIGTERM to SIGKILL; 120s by default.")] = None
    max_restarts: Annotated[int | None, of_run(help="How often it is restarted if it fails.")] = None
    restart_after_node_loss: Annotated[bool | None, of_run(help="Whether it runs again if its node is lost.")] = None
    hold: Annotated[bool | None, of_run("--hold", help="Start after a release.")] = None
    array: Annotated[
        str | None,
        of_run(
            metavar="INDICES", help="One job for each index: 0-99, 0-99:10, 1,3,5-9; 0-99%8 runs at most 8 at once."
        ),
    ] = None
    after: Annotated[
        list[str] | None,
        of_run(
            metavar="HOW:JOB",
            help="Start when a job or array has ended: ok:JOB, any:JOB or not_ok:JOB; may be repeated.",
        ),
    ] = None

    @classmethod
    def of(cls, typed: dict[str, Any], **more: Any) -> Self:
        """Return those among the parameters of a command, and ``more``."""
        return cls(**{each.name: typed[each.name] for each in fields(cls) if each.name in typed} | more)

    def given(self) -> list[str]:
        """Return the options that were given, as people type them."""
        return [
            f"--{name.replace('_', '-')}"
            for name, value in self.__dict__.items()
            if value is not None and value not in ((), [])
        ]


def read_specs(file: Path, text: str | None = None, sources: LocalSources | None = None) -> list[JobSpec]:
    """Return the jobs of a YAML or JSON file: one spec, a list of them, or ``jobs:`` and a list.

    ``{python}`` in a command stands for the Python of this installation and ``{examples}`` for the folder of examples.
    A ``working_dir`` or ``checkpoint_dir`` that is not absolute is relative to the file.

    Args:
        file: The file; ``-`` is standard input, whose paths are relative to the current folder.
        text: Its text, if it has been read already.
        sources: Packs the folders that specs name as uploads.

    Raises:
        CliError: The file cannot be read, or a spec is not valid; the message names the field.
    """
    document = _document(file, text_of(file) if text is None else text)
    is_list = not isinstance(document, dict)
    entries: Any = document if is_list else document.get("jobs", [document])
    if not isinstance(entries, list) or not entries:
        raise CliError(f"{file}: expected a job, a list of jobs, or an object with a list named jobs", EXIT_USAGE)
    folder = Path.cwd() if str(file) == "-" else file.absolute().parent
    single = not is_list and "jobs" not in document
    sources = sources or LocalSources()
    return [_spec_of(file, entry, folder, None if single else at, sources) for at, entry in enumerate(entries)]


def _document(file: Path, text: str) -> Any:
    if file.suffix == ".json" or text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            if file.suffix == ".json":
                raise CliError(f"cannot read {file}: it is not JSON: {error}", EXIT_USAGE) from None
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise CliError(
            f"cannot read {file}: it is not YAML: {where}{getattr(error, 'problem', None) or error}", EXIT_USAGE
        ) from None


def _spec_of(file: Path, entry: Any, folder: Path, at: int | None, sources: LocalSources) -> JobSpec:
    if isinstance(entry, dict):
        if entry.get("source") is not None:
            entry = {**entry, "source": sources.of_document(entry["source"], folder)}
        in_source = entry.get("source") is not None
        places = {
            name: str(Path(os.path.normpath(folder / entry[name])))
            for name in (("checkpoint_dir",) if in_source else ("working_dir", "checkpoint_dir"))
            if isinstance(entry.get(name), str) and entry[name]
        }
        deadline = entry.get("deadline")  # YAML has times of its own
        times = {"deadline": deadline.isoformat()} if isinstance(deadline, datetime) else {}
        entry = {**entry, **places, **times}
    try:
        spec = JobSpec.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = field_of([*([] if at is None else ["jobs", at]), *first["loc"]]) or "the job"
        raise CliError(f"{file}: {field}: {explained(first)}", EXIT_USAGE) from None
    return spec.model_copy(update={"command": [filled(word) for word in spec.command]})


def command_words(text: str) -> list[str]:
    """Return the words of ``--command``, or a shell's if it has shell syntax; ``CliError`` if a quote is open."""
    try:
        words = [filled(word) for word in shlex.split(text)]
    except ValueError as error:
        raise CliError(f"--command: {str(error).lower()} in {text!r}", EXIT_USAGE) from None
    return ["/bin/sh", "-c", text] if needs_shell(text) else words


_AS_TYPED = (
    *("priority", "max_restarts", "restart_after_node_loss", "preemptible", "may_share_gpu", "flex", "hold", "array"),
    *("may_move", "project", "processes", "family"),
)
_OF_GPUS = ("model", "slice", "zone", "within", "near")
"""Fields of a spec, and of its GPUs, that are as the options of the same name."""


def spec_of(
    options: SpecOptions,
    command: list[str],
    name: str,
    environment: dict[str, str],
    source: dict[str, Any] | None = None,
    *,
    elsewhere: bool = False,
) -> JobSpec:
    """Return the spec made from options and a command, with the caller's folder and chosen variables.

    Args:
        command: Program and arguments; empty for the container's own.
        name: The job's name unless the options give one.
        source: The job's files, if they travel with it: it runs among them, and not in the caller's folder.
        elsewhere: Whether the job runs on other machines, which lack the caller's programs.

    Raises:
        CliError: An option is not valid; the message names it.
    """
    name = options.name or job_name(name)
    captures = not (options.container or elsewhere or options.clean_env)
    if not command and (options.output or options.error or options.results):
        raise CliError("--output, --error and --results go with a command", EXIT_USAGE)
    if options.results and source is not None:
        command = staying(command)
    if options.output or options.error:
        command = copying(command, name, options.output, options.error)
    document: dict[str, Any] = {
        **{name: getattr(options, name) for name in _AS_TYPED},
        "name": name,
        "command": command,
        "image": options.container,
        "environment": _environment(options, environment, captures=captures),
        "source": source,
        "working_dir": _working_dir(options, source),
        "checkpoint_dir": os.path.abspath(options.checkpoint_dir) if options.checkpoint_dir else None,
        "gpus": _gpus(options.gpus or "1")
        | {name: getattr(options, name) for name in _OF_GPUS}
        | {"memory_gib": None if options.memory is None else _gib(options.memory)},
        "work": None if options.work is None else _work(options.work),
        "progress": None if options.progress is None else _progress(options.progress),
        "deadline": time_of(options.deadline, "--deadline", datetime.now(UTC)) if options.deadline else None,
        "flexibility_s": duration_s(options.flexible, "--flexible") if options.flexible else None,
        "time_limit_s": duration_s(options.time, "--time") if options.time else None,
        "grace_s": duration_s(options.grace, "--grace") if options.grace else None,
        "cells": words_of(options.cells, "--cells") if options.cells else None,
        "after": _after(options.after),
        "notify": words_of(options.notify, "--notify") if options.notify else None,
        "labels": dict(pair(each, "--label") for each in options.label or []),
        **({} if options.batch is None else _batch(options.batch)),
        "secrets": _secrets(options) or None,
    }
    try:
        return JobSpec.model_validate({name: value for name, value in document.items() if value is not None})
    except ValidationError as error:
        raise CliError(_in_options(error), EXIT_USAGE) from None


_OPTION_OF = {
    "image": "--container",
    "environment": "--env",
    "working_dir": "--workdir",
    "flexibility_s": "--flexible",
    "time_limit_s": "--time",
    "grace_s": "--grace",
    "labels": "--label",
    "global_batch": "--batch",
    "gpus.memory_gib": "--memory",
    **{f"gpus.{name}": f"--{name}" for name in _OF_GPUS},
    "secrets": "--secret",
    "source.git": "--git",
    "source.git.secret": "--git-secret",
}


def _in_options(error: ValidationError) -> str:
    field, separator, said = first_error(error, whole="the job").partition(": ")
    first = field.partition(".")[0]
    option = _OPTION_OF.get(field) or _OPTION_OF.get(first) or f"--{first.replace('_', '-')}"
    return f"{option}{separator}{said}" if field != "the job" else f"{field} {said}"


def job_name(text: str) -> str:
    """Return a valid name for a job that runs ``text``, the name of a program or script."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:63]
    return name if re.match(NAME_PATTERN, name) else "job"


def program_name(command: list[str]) -> str:
    """Return a name for what a command runs: its first script or module, or else its program."""
    for word, following in zip_longest(command[1:], command[2:], fillvalue=""):
        if word == "-m" and following:
            return following
        if not word.startswith("-") and Path(word).suffix in (".py", ".sh", ".ipynb"):
            return Path(word).stem
    return Path(command[0]).name if command else "job"


def _gpus(text: str) -> dict[str, Any]:
    pattern = r"(?P<min>\d+)(?:-(?P<max>\d+)(?::(?P<step>\d+))?(?:@(?P<asked>\d+))?)?"
    what = "is no gang size; write 4, 1-8, 2-8:2 for 2, 4, 6 or 8, or 1-8@4 if you would ask for 4"
    found = _matched("--gpus", pattern, text, what)
    sizes = {name: int(size) for name, size in found.groupdict().items() if size}
    return {"max": sizes["min"]} | sizes


def _batch(text: str) -> dict[str, Any]:
    what = "is no batch size; write 256, or 256-4096 for what a policy may choose from"
    least, most = _matched("--batch", r"(\d+)(?:-(\d+))?", text, what).groups()
    return {"batch": {"min": int(least), "max": int(most)}} if most else {"global_batch": int(least)}


def _gib(text: str) -> float:
    what = "is no size; write the GiB that each GPU must have, such as 40"
    return float(_matched("--memory", r"(\d+(?:\.\d+)?)\s*(?i:g|gb|gib)?", text, what)[1])


def _matched(option: str, pattern: str, text: str, what: str) -> re.Match[str]:
    if found := re.fullmatch(pattern, text.strip()):
        return found
    raise CliError(f"{option}: {text!r} {what}", EXIT_USAGE)


def _work(text: str) -> dict[str, Any]:
    total, _, unit = text.partition(":")
    try:
        return {"total": decimal(total), "unit": unit or "steps"}
    except ValueError:
        raise CliError(
            f"--work: {text!r} is no amount; write 30000:steps, 90:epochs or 1e6:samples", EXIT_USAGE
        ) from None


def _progress(text: str) -> dict[str, Any]:
    source, separator, pattern = text.partition(":")
    if source == "log":
        if not pattern:
            raise CliError("--progress: log needs a pattern: log:'step (?P<done>[0-9]+)'", EXIT_USAGE)
        return {"source": "log", "pattern": pattern}
    if separator or source not in ("file", "http", "none"):
        raise CliError(f"--progress: {text!r} is none of file, http, none and log:PATTERN", EXIT_USAGE)
    return {"source": source}


def _after(words: list[str] | None) -> dict[str, list[str]] | None:
    """Return the dependencies that words such as ``ok:prepare`` name."""
    found: dict[str, list[str]] = {}
    for word in words or ():
        condition, separator, job = word.partition(":")
        if condition not in list(Condition) or not job:
            hint = f"; did you mean ok:{word}?" if not separator else ""
            raise CliError(f"--after: {word!r} is none of ok:JOB, any:JOB and not_ok:JOB{hint}", EXIT_USAGE)
        found.setdefault(condition, []).append(job)
    return found or None


def _secrets(options: SpecOptions) -> list[SecretUse]:
    """Return the uses of secrets that ``--secret NAME[=VARIABLE]`` and ``--secret-file NAME[=FILE]`` ask for."""
    uses: list[SecretUse] = []
    for option, kind, words in (("--secret", "env", options.secret), ("--secret-file", "file", options.secret_file)):
        for word in words or []:
            name, separator, place = word.partition("=")
            if not re.match(NAME_PATTERN, name) or (separator and not place):
                wanted = "NAME or NAME=VARIABLE" if kind == "env" else "NAME or NAME=FILE"
                raise CliError(f"{option}: {word!r} is not of the form {wanted}", EXIT_USAGE)
            if kind == "env" and not separator and not name.isidentifier():
                raise CliError(f"{option}: {name} cannot be a variable; write {name}=VARIABLE", EXIT_USAGE)
            try:
                uses.append(SecretUse.model_validate({"name": name, kind: place or name}))
            except ValidationError as error:
                raise CliError(f"{option}: {explained(error.errors()[0])}", EXIT_USAGE) from None
    return uses


def _working_dir(options: SpecOptions, source: dict[str, Any] | None) -> str | None:
    """Return the folder to run in: with a source, a folder inside it."""
    if source is None:
        return str(Path(os.path.abspath(options.workdir or Path.cwd())))
    if options.workdir is None:
        return None
    if options.workdir.is_absolute() or ".." in options.workdir.parts:
        raise CliError(f"--workdir: {options.workdir} must be a folder in the source, such as src", EXIT_USAGE)
    return str(options.workdir)


def _environment(options: SpecOptions, own: dict[str, str], *, captures: bool) -> dict[str, str]:
    """Return the caller's variables that the job gets, those from files, and those of ``--env``; the last wins."""
    chosen = {name: own[name] for name in CAPTURED if name in own} if captures else {}
    for file in options.env_file or []:
        for number, line in enumerate(text_of(file).splitlines(), start=1):
            line = line.strip().removeprefix("export ")
            if line and not line.startswith("#"):
                name, value = pair(line, f"--env-file: {file}, line {number}")
                chosen[name.strip()] = _unquoted(value.strip())
    for word in options.env or []:
        name, separator, value = word.partition("=")
        if not separator and name.endswith("*"):
            chosen |= {each: own[each] for each in own if each.startswith(name[:-1]) and _may_pass(each)}
            continue
        if not separator and name not in own:
            raise CliError(f"--env: {name} is not set here; write {name}=VALUE", EXIT_USAGE)
        chosen[name] = value if separator else own[name]
    return chosen


def _may_pass(name: str) -> bool:
    """Return whether a variable may be passed on without being named: the control plane's, such as keys, may not."""
    return name.isidentifier() and name.isascii() and not name.startswith("WATTSHIFT_")


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
