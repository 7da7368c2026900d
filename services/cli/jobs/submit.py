"""``wattshift submit``: a command, a script with ``#WATTSHIFT`` lines, or a file of specs."""

import os
import shlex
import shutil
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from services.cli import output
from services.cli.client import Gateway, gateway_url, installation_of, is_local
from services.cli.commands import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_USAGE, CliError, with_records
from services.cli.jobs import following, foreign
from services.cli.jobs import specs as job_specs
from services.cli.jobs.estimate import show_estimates
from services.cli.jobs.forward import checked_results, fetched
from services.cli.jobs.names import USER_LABEL, job_or_array, number_of, user_name
from services.cli.jobs.reach import Obstacle, Runner, closed_folders, obstacles, opened_by, programs_of, runner_of
from services.cli.jobs.scripts import Script, read_script
from services.cli.jobs.sources import LocalSources
from services.cli.jobs.specs import of_job, of_run, of_sending
from services.cli.output import console
from services.cli.site.opening import has_lists, is_named, let_through, may_be_opened, open_to
from services.cli.values import text_of
from services.contracts.jobs import MAX_BATCH_JOBS, JobBatch, JobSpec

_REST, _SCRIPT, _TEXT, _TYPED = "wattshift.rest", "wattshift.script", "wattshift.text", "wattshift.typed"
_NOT_IN_SCRIPTS = frozenset(
    ("file", "command", "wait", "follow", "results", "as_json", "test_only", "read_only", "idempotency_key")
)


def register(app: typer.Typer) -> None:
    app.command(cls=SubmitCommand)(submit)


class SubmitCommand(typer.core.TyperCommand):
    """Keeps what follows ``--`` apart, and reads a script's options as if they came before those typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = list(args)
        ctx.meta[_TYPED] = tuple(args)
        rest: list[str] = []
        if "--" in args:
            at = args.index("--")
            ctx.meta[_REST] = rest = args[at + 1 :]
            args = args[:at]
        if not ctx.resilient_parsing and args and args[0] not in ctx.help_option_names:
            args = self._divided(ctx, args, rest)
            if not set(args) & set(ctx.help_option_names):
                args = [*self._from_script(ctx, args), *args]
        return super().parse_args(ctx, args)

    def _divided(self, ctx: Any, args: list[str], rest: list[str]) -> list[str]:
        """Return the words for ``submit`` itself; those of a program or script join what follows ``--``.

        As with ``srun``, everything after a program belongs to the program. What follows a script is taken as options
        of ``submit`` if all of it can be, and as the script's own arguments if none of it can.

        Raises:
            CliError: Only some of it can, or the words are for another scheduler; the message has the line to type.
        """
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        try:
            files: Any = parser.parse_args(args=list(args))[0].get("file") or ()
        except Exception as error:  # see _checked
            if type(error).__name__ != "NoSuchOption" or not (line := foreign.as_own(args, self._takes(ctx))):
                raise
            raise CliError(f"{error}: type\n  {line}", EXIT_USAGE) from None
        before, after = args[: len(args) - len(files)], list(files[1:])
        if files and files[0] in foreign.SUBMITTERS:
            line = foreign.as_own([*after, *(["--", *rest] if rest else [])], {})
            raise CliError(f"wattshift submits without {files[0]}: type\n  {line}", EXIT_USAGE)
        if files and (_is_program(files[0]) or (after and not Path(files[0]).suffix and not Path(files[0]).exists())):
            between = ["--"] if after and rest else []
            ctx.meta[_REST] = [files[0], *after, *between, *rest]
            return before
        if not after or Path(files[0]).suffix in job_specs.SPEC_SUFFIXES:
            return args
        own = [word for word in after if word.partition("=")[0] in self._takes(ctx)]
        if own and self._are_own(ctx, after):
            return args
        if own:
            mine, others = foreign.parted(after, self._takes(ctx))
            line = shlex.join(["wattshift", "submit", *before, *mine, files[0], "--", *others, *rest])
            raise CliError(f"it is not clear whose {own[0]} after {files[0]} is: type\n  {line}", EXIT_USAGE)
        ctx.meta[_REST] = [*after, *rest]
        return [*before, files[0]]

    def _takes(self, ctx: Any) -> dict[str, bool]:
        """Return the options by name, and whether a value follows each."""
        return {
            name: not getattr(each, "is_flag", False)
            for each in self.get_params(ctx)
            for name in (*each.opts, *each.secondary_opts)
            if name.startswith("-")
        }

    def _are_own(self, ctx: Any, words: list[str]) -> bool:
        try:
            given, left, _ = self.make_parser(ctx).parse_args(args=list(words))
        except Exception:
            return False
        return not left and not given.get("file")

    def _from_script(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        files = given.get("file")
        if not isinstance(files, list | tuple) or len(files) != 1:
            return []
        file = str(files[0])
        text = ctx.meta[_TEXT] = text_of(Path(file))
        if not is_script(file, text):
            return []
        script = ctx.meta[_SCRIPT] = read_script(file, text)
        own = [word for number, words in script.directives for word in self._checked(ctx, script, number, words)]
        return [*self._foreign(ctx, script, [*own, *args]), *own]

    def _foreign(self, ctx: Any, script: Script, winning: list[str]) -> list[str]:
        """Return the options that other schedulers' lines stand for, and say on standard error what is not obeyed."""
        given, _, _ = self.make_parser(ctx).parse_args(args=winning)
        options, said = foreign.obeyed(script.name, script.text, script.foreign, _named(given))
        if said:
            output.say(f"wattshift: {script.name} is not obeyed in all: {'; '.join(said)}")
        if "--name" in options:
            at = options.index("--name") + 1
            options[at] = job_specs.job_name(options[at])
        return options

    def _checked(self, ctx: Any, script: Script, number: int, words: list[str]) -> list[str]:
        """Return the words of one ``#WATTSHIFT`` line, which must be options of a job and nothing else."""
        where = f"{script.name}, line {number}"
        try:
            given, left, _ = self.make_parser(ctx).parse_args(args=list(words))
        except Exception as error:  # typer has its own copy of click's exceptions, and does not export it
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            raise CliError(f"{where}: {message()}", EXIT_USAGE) from None
        if wrong := sorted(_named(given) & _NOT_IN_SCRIPTS) or left:
            what = (
                "a script is its own command"
                if "file" in wrong or "command" in wrong or left
                else (f"--{wrong[0].replace('as_', '').replace('_', '-')} goes on the command line")
            )
            raise CliError(f"{where}: {what}; only options that describe the job may stand here", EXIT_USAGE)
        return words


def _is_program(word: str) -> bool:
    """Return whether a word is a program's name, or the path of one that is not a script."""
    path = Path(word)
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    return path.suffix not in job_specs.SPEC_SUFFIXES and shutil.which(word) is not None


def _named(given: dict[str, Any]) -> set[str]:
    return {name for name, value in given.items() if isinstance(value, str | int | list | tuple) and value}


def is_script(file: str, text: str) -> bool:
    """Return whether a file is a script and not a spec: it begins with ``#!``, or is not named or written as a spec."""
    if text.startswith("#!"):
        return True
    if Path(file).suffix in job_specs.SPEC_SUFFIXES or file == "-":
        return False
    return text.lstrip()[:1] not in ("{", "[")


def submit_all(gateway: Gateway, specs: list[JobSpec], idempotency_key: str | None = None) -> list[Any]:
    """Submit jobs, in batches where there are many; return the accepted jobs in order."""
    key = idempotency_key or uuid.uuid4().hex
    if len(specs) == 1:
        return [gateway.call("POST", "/v1/jobs", body=specs[0], key=key)]
    accepted: list[Any] = []
    for number, start in enumerate(range(0, len(specs), MAX_BATCH_JOBS)):
        batch = JobBatch(jobs=specs[start : start + MAX_BATCH_JOBS])
        try:
            accepted += gateway.call("POST", "/v1/jobs:batch", body=batch, key=f"{key}-{number}")["jobs"]
        except CliError as error:
            if not accepted:
                raise
            before = f"{len(accepted)} of {len(specs)} jobs are accepted, {accepted[0]['id']} to {accepted[-1]['id']}"
            again = f"--idempotency-key {key} submits the others"
            raise CliError(f"{error}\n{before}; the same with {again}", error.exit_code, error.code) from error
    return accepted


def submit_for_a_while(gateway: Gateway, spec: JobSpec) -> Any:
    """Submit a job that is not to outlive this command; if it is interrupted meanwhile, cancel what may be accepted."""
    key = uuid.uuid4().hex
    try:
        return submit_all(gateway, [spec], key)[0]
    except (KeyboardInterrupt, SystemExit):
        with suppress(CliError):
            job = submit_all(gateway, [spec], key)[0]  # by its key the same one
            gateway.call("POST", f"/v1/jobs/{job['id']}/cancel")
        raise


OF_JOBS = {"job.started", "job.ended"}  #: Events of webhooks that take messages about jobs


@with_records
def submit(
    context: typer.Context,
    file: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]",
            help="A script, with options in #WATTSHIFT or #SBATCH lines before its first command; a program; or YAML "
            "or JSON with one or more specs. - is standard input. What follows is the script's or the program's, in "
            "any case after --.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str | None,
        of_job("--command", "-c", help="The command, as typed into a shell; a shell runs it if it needs one."),
    ] = None,
    *,
    options: job_specs.SpecOptions,
    idempotency_key: Annotated[str | None, of_sending(help="Submitting again with the same key is safe.")] = None,
    wait: Annotated[bool, of_sending("--wait", help="Wait for the end; exit 1 unless every job succeeds.")] = False,
    follow: Annotated[bool, of_sending("--follow", "-f", help="As --wait, and print the job's output.")] = False,
    read_only: Annotated[
        bool, of_run("--read-only", help="The job writes nothing to its folder, which need not let it.")
    ] = False,
    test_only: Annotated[
        bool,
        of_sending(
            "--test-only", help="Check the jobs; say when they would start and what they would emit. Submits nothing."
        ),
    ] = False,
    as_json: Annotated[bool, of_sending("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Submit jobs; print their ids.

    wattshift submit --gpus 1-4 --command 'python3 train.py'
    wattshift submit --gpus 2 python3 train.py --lr 0.1
    wattshift submit train.py --lr 0.1
    wattshift submit --gpus 4 train.sh arguments
    wattshift submit jobs.yaml

    A job runs in the folder it is submitted from, with the caller's PATH and virtual environment.
    """
    sources = LocalSources()
    specs = _specs(context, file or [], command, options, sources)
    gateway = Gateway()
    is_of_specs = context.params["file"] and _SCRIPT not in context.meta
    typed = context.meta[_TYPED] if len(specs) == 1 and not is_of_specs else ()
    check_folders(gateway, specs, writes=not read_only, typed=typed, opens=not test_only)
    if test_only:
        check_dependencies(gateway, specs)
        show_estimates(gateway, [sources.as_if_sent(spec) for spec in specs], as_json=as_json)
        return
    if follow and len(specs) == 1 and specs[0].array is not None:
        raise CliError("--follow shows the output of one job, not of an array; use --wait", EXIT_USAGE)
    if follow and len(specs) > 1:
        raise CliError(f"--follow shows the output of one job, not of {len(specs)}; use --wait", EXIT_USAGE)
    coming = checked_results(options.results or [], specs, ends=wait or follow)
    _say_where_messages_go(gateway, specs)
    if late := [spec.name for spec in specs if spec.deadline is not None and spec.deadline <= datetime.now(UTC)]:
        output.say(f"wattshift: the deadline of {', '.join(dict.fromkeys(late[:5]))} has passed already")
    sources.send(gateway)
    accepted = submit_all(gateway, specs, idempotency_key)
    _announce(accepted, as_json=as_json, follow=follow, wait=wait)
    if wait or follow:
        with fetched(gateway, accepted[0]["id"], coming) if coming else nullcontext():
            ended = _waited(gateway, [job["id"] for job in accepted], follow=follow, as_json=as_json)
        if any(job["state"] != "succeeded" for job in ended):
            raise typer.Exit(EXIT_FAILED)


def _say_where_messages_go(gateway: Gateway, specs: list[JobSpec]) -> None:
    """Say to which webhooks the messages go that jobs ask for, or how to make one if there is none."""
    projects = {spec.project for spec in specs if spec.notify}
    if not projects:
        return
    try:
        webhooks = gateway.get("/v1/webhooks")["items"]
    except CliError:  # a key of one project reads none
        return
    urls = [
        each["url"]
        for each in webhooks
        if each["enabled"] and each["project"] in (None, *projects) and OF_JOBS & set(each["events"])
    ]
    if urls:
        output.say(f"wattshift: messages about it are posted to {' and '.join(urls)}")
    else:
        output.say("wattshift: no webhook takes messages about it: `wattshift webhooks create URL` makes one")


def _waited(gateway: Gateway, ids: list[str], *, follow: bool, as_json: bool) -> list[Any]:
    """Wait for jobs to end, or follow the output of a single one; say how they ended, and return them."""
    with following.interruptible(ids):
        if follow:
            ended = [following.follow(gateway, ids[0])]
        else:
            ended = [[*following.states(gateway, job_id)][-1] for job_id in ids]
    if as_json:
        output.print_json(ended)
    elif not follow:
        for job in ended:
            output.say(following.ended_words(job))
    return ended


def _specs(
    context: typer.Context, files: list[str], command: str | None, options: job_specs.SpecOptions, sources: LocalSources
) -> list[JobSpec]:
    rest: list[str] | None = context.meta.get(_REST)
    script: Script | None = context.meta.get(_SCRIPT)
    if len(files) > 1:
        raise CliError(f"one FILE of specs at a time, not {len(files)}", EXIT_USAGE)
    forms = [bool(files), command is not None, rest is not None and not files]
    if sum(forms) > 1:
        raise CliError("give one of these: a FILE, --command, or -- and a command", EXIT_USAGE)
    if not any(forms) and not options.container:
        raise CliError("what should run? Give a FILE, --command 'python3 train.py', or -- python3 train.py", EXIT_USAGE)
    if files and script is None:
        if given := options.given():
            raise CliError(f"{given[0]} goes with a command or a script; in {files[0]}, the spec says it", EXIT_USAGE)
        if rest:
            raise CliError(f"{files[0]} is no script, and takes no arguments after --", EXIT_USAGE)
        return [signed(spec) for spec in job_specs.read_specs(Path(files[0]), context.meta.get(_TEXT), sources)]
    if script is not None:
        words, name = script.command(rest or [], _in_place(Path(files[0]), options)), Path(script.name).stem
    else:
        words = rest if rest else job_specs.command_words(command) if command is not None else []
        if not words and not options.container:
            raise CliError("the command is empty", EXIT_USAGE)
        name = job_specs.program_name(command.split() if command else words)
        name = name if words else (options.container or "job").rpartition("/")[2].partition(":")[0]
    source = sources.of_options(options.upload, options.git, options.git_secret)
    elsewhere = source is not None and not is_local(gateway_url())
    return [signed(job_specs.spec_of(options, words, name, dict(os.environ), source, elsewhere=elsewhere))]


def _in_place(file: Path, options: job_specs.SpecOptions) -> str:
    """Return the path of a script as its job sees it."""
    folder = options.upload or options.workdir or Path()
    with suppress(ValueError):
        return str(file.absolute().relative_to(folder.absolute()))
    return str(file if options.git else file.absolute())


def signed(spec: JobSpec) -> JobSpec:
    """Return the spec with the label that `wattshift jobs --mine` looks for, unless it has one."""
    return spec.model_copy(update={"labels": {USER_LABEL: user_name(), **spec.labels}})


def check_folders(
    gateway: Gateway, specs: list[JobSpec], *, writes: bool = True, typed: Sequence[str] = (), opens: bool = True
) -> None:
    """Check that jobs can run in their folders, before they are submitted.

    On this machine, the jobs' account must be able to enter the folder, write to it, and run the program; a folder of
    root's is opened to the account.

    Args:
        writes: Whether they must be able to write to their folders.
        typed: The words after ``wattshift submit`` if they describe the only job.
        opens: Whether folders may be opened; otherwise those that could be count as open.

    Raises:
        CliError: A job could not run; the lines below the first are what to type instead.
    """
    is_here = is_local(gateway.url)
    on_nodes = [spec for spec in specs if not spec.image]
    for folder in dict.fromkeys(spec.working_dir for spec in on_nodes if spec.working_dir and not spec.source):
        if Path(folder).is_dir():
            continue
        what = "is not a folder" if Path(folder).exists() else "does not exist"
        if is_here:
            raise CliError(f"working folder {folder} {what}; choose another with --workdir", EXIT_NOT_FOUND)
        output.say(f"wattshift: working folder {folder} {what} on this machine; nodes must have it")
    if not (is_here and on_nodes):
        return
    installation = installation_of(gateway.url)
    runner = runner_of(gateway.get("/v1/whoami"), installation)
    if runner is None:
        return
    kept = [*runner.shown, *runner.passed, *filter(None, [installation])]
    for spec in on_nodes:
        folder = Path(spec.working_dir) if spec.working_dir and not spec.source else None
        programs = programs_of(runner, spec.command, spec.environment, folder)
        found = obstacles(runner, folder, programs, writes=writes)
        is_ours = folder is not None and may_be_opened(folder, kept)
        if folder and is_ours and (found or is_named(runner.user_id, folder)):
            inside = replace(runner, shown=(*runner.shown, Path(os.path.realpath(folder)), folder))
            within = programs_of(inside, spec.command, spec.environment, folder)
            runs = not obstacles(inside, None, within, writes=writes)
            if runs and (_is_opened(runner, folder, writes=writes) if opens else has_lists(folder)):
                programs, found = within, []
        if found:
            ways = "".join(f"\n  {line}" for line in _ways_round(runner, found, spec, folder, typed, is_ours))
            what = f"jobs run as the account {runner.name}, which {found[0].what}"
            raise CliError(f"{what}{': type one of' if ways else ''}{ways}", EXIT_NOT_FOUND)
        for each in programs:
            if each.instead_of:
                why = f"the account {runner.name} cannot run {each.instead_of}, which comes first in PATH"
                output.say(f"wattshift: {spec.name} runs {each.path}: {why}")


def _is_opened(runner: Runner, folder: Path, *, writes: bool) -> bool:
    """Open a folder to an account, and say so if it was not open before; return whether that worked."""
    try:
        is_new = open_to(runner.user_id, folder, writes=writes)
        for closed in () if runner.sees_opened else closed_folders(runner, folder):
            let_through(runner.user_id, closed)
    except OSError:
        return False
    if is_new:
        what = f"opened {folder} by access lists to the account {runner.name}, which the job runs as"
        output.say(f"wattshift: {what}; to close it again: setfacl -Rbk {shlex.quote(str(folder))}")
    return True


def _ways_round(
    runner: Runner, found: Sequence[Obstacle], spec: JobSpec, folder: Path | None, typed: Sequence[str], is_ours: bool
) -> list[str]:
    """Return the lines to type instead when a job's account keeps it from running as typed."""

    def would_run(folder: Path | None, *, writes: bool) -> bool:
        programs = programs_of(runner, spec.command, spec.environment, folder)
        return not obstacles(runner, folder, programs, writes=writes)

    lines: list[str] = []
    if typed and folder:
        words = _without_workdir(typed)
        says_where = len(words) < len(typed) or folder == Path.cwd()  # else a script does
        has_files = os.access(folder, os.R_OK) and any(folder.iterdir())
        if says_where and has_files and would_run(None, writes=True):
            where = "." if folder == Path.cwd() else str(folder)
            lines.append(shlex.join(["wattshift", "submit", "--upload", where, *words]))
        if would_run(folder, writes=False):
            lines.append(shlex.join(["wattshift", "submit", "--read-only", *typed]))
    if os.geteuid() == 0 and folder and not is_ours:
        return lines  # what only root may use stays so
    return [*lines, *filter(None, [opened_by(found)])]


def _without_workdir(typed: Sequence[str]) -> list[str]:
    at = list(typed).index("--") if "--" in typed else len(typed)
    words = [word for word in typed[:at] if not word.startswith("--workdir=")]
    if "--workdir" in words:
        place = words.index("--workdir")
        del words[place : place + 2]
    return [*words, *typed[at:]]


def check_dependencies(gateway: Gateway, specs: list[JobSpec]) -> None:
    """Check that the jobs that others depend on exist; those in the same submission are not looked up.

    Raises:
        CliError: One does not exist, or its name is ambiguous.
    """
    own = {spec.name for spec in specs} if len(specs) > 1 else set[str]()
    words = [word for spec in specs if spec.after for _, word in spec.after.references()]
    for word in dict.fromkeys(words):
        if isinstance(word, str) and word not in own:
            job_or_array(gateway, word)


def _announce(accepted: list[Any], *, as_json: bool, follow: bool, wait: bool) -> None:
    """Say what was submitted: only the ids if standard output is read by a program."""
    if as_json:
        if not (wait or follow):
            output.print_json(accepted)
        return
    shown = console.is_terminal
    for job in accepted:
        if follow:
            output.say(f"{number_of(job)}  {job['id']}  {job['name']}")
        elif shown:
            tasks = f": {job['count']} jobs" if job.get("count") else ""
            are = "are" if tasks else "is"
            what = f"{job['name']}{tasks} {are} {output.state(job['state'])}"
            console.print(f"[bold]{number_of(job)}[/]  {job['id']}  {what}")
        else:
            console.print(job["id"])
    if shown and not (follow or wait) and len(accepted) == 1:
        job = accepted[0]
        then = "wattshift release" if job["state"] == "held" else "wattshift logs --follow"
        if job.get("count") and job["state"] != "held":
            then = "wattshift jobs --array"
        console.print(f"[dim]{then} {job.get('number') or job['id']}[/]")
