"""``wattshift submit`` in its three forms, as the gateway receives the jobs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, CliError
from services.cli.jobs.scripts import needs_shell, read_script
from services.cli.jobs.submit import submit_all
from services.cli.main import app
from services.contracts.jobs import MAX_BATCH_JOBS, JobSpec
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/venv/bin:/usr/bin:/bin")
    monkeypatch.setenv("VIRTUAL_ENV", f"{tmp_path}/venv")
    monkeypatch.setenv("WANDB_PROJECT", "trees")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.delenv("CONDA_DEFAULT_ENV", raising=False)
    monkeypatch.setenv("LOGNAME", "ada")


def submitted(run: Run, gateway: Gateway, *words: str) -> dict[str, Any]:
    """Submit one job and return the spec that the control plane has of it."""
    (job_id,) = run("submit", *words).split()
    return gateway.get(f"/v1/jobs/{job_id}")["spec"]


def test_a_job_runs_where_and_as_it_was_submitted(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    spec = submitted(run, gateway, "--gpus", "1-4", "--command", "python3 train.py")

    assert spec["command"] == ["python3", "train.py"]
    assert spec["working_dir"] == str(tmp_path)
    assert spec["environment"] == {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "VIRTUAL_ENV": f"{tmp_path}/venv"}
    assert (spec["name"], spec["gpus"]["min"], spec["gpus"]["max"]) == ("train", 1, 4)
    assert spec["labels"] == {"user": "ada"}


@pytest.mark.parametrize("deadline", ["2020-01-01", "+6h"])
def test_a_deadline_that_has_passed_is_said(
    run: Run, gateway: Gateway, capsys: pytest.CaptureFixture[str], deadline: str
) -> None:
    app(["submit", "--deadline", deadline, "--name", "late", "-c", "true"], standalone_mode=False)
    said = "wattshift: the deadline of late has passed already"
    assert (said in capsys.readouterr().err) == (deadline == "2020-01-01")


def test_what_follows_two_dashes_is_the_command_untouched(run: Run, gateway: Gateway) -> None:
    spec = submitted(run, gateway, "--gpus", "2", "--", "python3", "train.py", "--x", "a b", "--gpus", "9", "--", "$X")

    assert spec["command"] == ["python3", "train.py", "--x", "a b", "--gpus", "9", "--", "$X"]
    assert spec["gpus"]["min"] == 2


def test_a_job_may_share_its_gpu_if_it_says_what_memory_it_needs(run: Run, gateway: Gateway) -> None:
    spec = submitted(run, gateway, "-c", "true", "--memory", "12G", "--may-share-gpu")

    assert spec["may_share_gpu"]
    with pytest.raises(CliError, match="how much of its memory"):
        run("submit", "-c", "true", "--may-share-gpu")


def test_a_job_may_move_between_cells_if_it_says_where_its_checkpoint_is(run: Run, gateway: Gateway) -> None:
    spec = submitted(run, gateway, "-c", "true", "--cells", "any", "--may-move", "--checkpoint-dir", "/shared/run")

    assert spec["may_move"]
    with pytest.raises(CliError, match="may_move needs cells and a checkpoint_dir"):
        run("submit", "-c", "true", "--may-move")


def test_every_option_arrives_in_the_spec(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "job.env").write_text("# a comment\nexport A=1\nB='two words'\n\nSEED=7\n")
    (tmp_path / "here").mkdir()
    before = datetime.now(UTC)
    spec = submitted(
        run, gateway, "-c", "sh run.sh", "--name", "trees", "--gpus", "2-8:2@4", "--model", "H100", "--memory", "40G",
        "--zone", "SE", "--work", "30000:steps", "--progress", "log:step (?P<done>[0-9]+)", "--priority", "-5",
        "--deadline", "+6h", "--flexible", "2h", "--time", "36:00:00", "--grace", "90", "--max-restarts", "3",
        "--no-restart-after-node-loss",
        "--project", "forest", "--label", "kind=bert", "--label", "user=bob", "--hold", "--not-preemptible",
        "--processes", "per_node", "--batch", "512", "--family", "language", "--env", "WANDB_PROJECT",
        "--env", "SEED=8", "--env-file", "job.env", "--workdir", "here", "--checkpoint-dir", "ckpt",
    )  # fmt: skip

    gpus = {"min": 2, "max": 8, "step": 2, "asked": 4, "model": "H100", "memory_gib": 40, "zone": "SE"}
    assert {name: spec["gpus"][name] for name in gpus} == gpus
    assert spec["work"] == {"total": 30_000, "unit": "steps"}
    assert spec["progress"] == {"source": "log", "pattern": "step (?P<done>[0-9]+)"}
    assert timedelta(hours=5.9) < datetime.fromisoformat(spec["deadline"]) - before < timedelta(hours=6.1)
    seconds = {"flexibility_s": 7_200, "time_limit_s": 129_600, "grace_s": 90}
    words = {"name": "trees", "project": "forest", "processes": "per_node", "family": "language"}
    numbers = {"priority": -5, "max_restarts": 3, "global_batch": 512, "hold": True, "preemptible": False}
    numbers["restart_after_node_loss"] = False
    for field, value in {**seconds, **words, **numbers}.items():
        assert spec[field] == value, field
    assert spec["labels"] == {"kind": "bert", "user": "bob"}
    chosen = {name: spec["environment"][name] for name in ("A", "B", "SEED", "WANDB_PROJECT")}
    assert chosen == {"A": "1", "B": "two words", "SEED": "8", "WANDB_PROJECT": "trees"}
    assert spec["working_dir"] == str(tmp_path / "here")
    assert spec["checkpoint_dir"] == str(tmp_path / "ckpt")


def test_mail_becomes_messages_to_a_webhook_or_the_line_that_makes_one(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = "#!/bin/sh\n#SBATCH --gpus=1 --mail-type=BEGIN,FAIL\n#WATTSHIFT --project messages\ntrue\n"
    (tmp_path / "train.sh").write_text(script)

    def said(*words: str) -> str:
        assert not app(list(words), standalone_mode=False)
        shown = capsys.readouterr()
        if words[0] == "submit":
            assert gateway.get(f"/v1/jobs/{shown.out.strip()}")["spec"]["notify"] == ["started", "failed"]
        return shown.err.strip()

    there = {each["id"]: each for each in gateway.get("/v1/webhooks")["items"]}
    assert there == {}
    without = said("submit", "train.sh")
    assert without.startswith("wattshift: no webhook takes messages about it: `wattshift webhooks create URL`")
    url = "https://93.184.215.14/hook"
    advice = shlex.split(without.split("`")[1].replace("URL", url))
    said(*advice[1:], "--project", "others")
    assert said("submit", "train.sh") == without
    said(*advice[1:])
    assert said("submit", "train.sh") == f"wattshift: messages about it are posted to {url}"
    with pytest.raises(CliError, match="notify"):
        app(["submit", "-c", "true", "--notify", "begin"], standalone_mode=False)


def test_a_container_has_a_path_of_its_own(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    spec = submitted(run, gateway, "--container", "ghcr.io/lab/train:2", "--env", "A=b")

    assert (spec["image"], spec["name"], spec["command"]) == ("ghcr.io/lab/train:2", "train", [])
    assert spec["environment"] == {"A": "b"}
    assert spec["working_dir"] == str(tmp_path)


SCRIPT = """#!/bin/bash
# trains
#WATTSHIFT --gpus 2-4 --time 1h --name from-script
#WATTSHIFT --env A=1 --label "kind=a b"   # why not

echo "$1 in $PWD"
#WATTSHIFT --gpus 8
"""


def test_a_script_brings_its_options_and_those_typed_win(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)

    spec = submitted(run, gateway, "train.sh", "--name", "typed", "--env", "A=2", "--", "x", "--name", "y")

    assert spec["command"] == ["/bin/bash", "-c", SCRIPT, "train.sh", "x", "--name", "y"]
    assert (spec["name"], spec["gpus"]["min"], spec["gpus"]["max"], spec["time_limit_s"]) == ("typed", 2, 4, 3_600)
    assert spec["environment"]["A"] == "2"
    assert spec["labels"] == {"kind": "a b", "user": "ada"}
    done = subprocess.run(spec["command"], cwd=spec["working_dir"], capture_output=True, text=True, check=True)
    assert done.stdout == f"x in {tmp_path}\n"


def test_a_python_script_runs_from_a_copy_beside_its_checkpoints(tmp_path: Path) -> None:
    text = f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:], __file__)\n"
    command = read_script("dir/show.py", text).command(["a b", "c"], "show.py")

    for _ in range(2):  # a restart finds the copy
        done = subprocess.run(
            command, env={"WATTSHIFT_CHECKPOINT_DIR": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        (copy,) = tmp_path.iterdir()
        assert done.stdout == f"['a b', 'c'] {copy}\n"
    assert copy.read_text() == text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--gpu 2", "line 2: No such option: --gpu"),
        ("--gpus 'x", "line 2: no closing quotation"),
        ("--wait", "line 2: --wait goes on the command line"),
        ("python3 train.py", "line 2: a script is its own command"),
        ("--gpus many", "--gpus: 'many' is no gang size"),
    ],
)
def test_a_bad_directive_is_named(run: Run, tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\n#WATTSHIFT {line}\ntrue\n")
    with pytest.raises(CliError, match=says) as refused:
        run("submit", "train.sh")
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.yaml", "name: a\ncommand: [x]\nworking_dir: src\ndeadline: 2027-01-01T00:00:00Z\n"),
        ("job.yml", "- {name: a, command: [x], working_dir: src, deadline: '2027-01-01T00:00:00Z'}\n"),
        ("job.json", json.dumps({"jobs": [{"name": "a", "command": ["x"], "working_dir": "src",
                                           "deadline": "2027-01-01T00:00:00Z"}]})),
    ],
)  # fmt: skip
def test_a_spec_says_everything_itself(run: Run, gateway: Gateway, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "specs" / "src").mkdir(parents=True)
    (tmp_path / "specs" / name).write_text(text)

    spec = submitted(run, gateway, f"specs/{name}")

    assert spec["working_dir"] == str(tmp_path / "specs" / "src")
    assert (spec["environment"], spec["command"]) == ({}, ["x"])
    assert datetime.fromisoformat(spec["deadline"]) == datetime(2027, 1, 1, tzinfo=UTC)


def test_many_jobs_are_as_many_lines_of_ids(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("jobs:\n- {name: a, command: [x]}\n- {name: b, command: [y]}\n")

    ids = run("submit", "jobs.yaml").splitlines()

    assert [gateway.get(f"/v1/jobs/{job_id}")["name"] for job_id in ids] == ["a", "b"]
    accepted = json.loads(run("submit", "jobs.yaml", "--json"))
    assert [job["name"] for job in accepted] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "what should run"),
        (("-c", "x", "--", "y"), "give one of these"),
        (("-c", ""), "the command is empty"),
        (("-c", "echo 'a"), "--command: no closing quotation"),
        (("-c", "x", "--gpus", "4-2"), "--gpus: max is smaller than min"),
        (("-c", "x", "--gpus", "2-8@9"), "--gpus: asked is not one of the sizes"),
        (("-c", "x", "--gpus", "2-8:2@3"), "--gpus: asked is not one of the sizes"),
        (("-c", "x", "--gpus", "0"), "--gpus: must be at least 1, not 0"),
        (("-c", "x", "--time", "1y"), "--time: '1y' is not a duration"),
        (("-c", "x", "--deadline", "noon"), "--deadline: 'noon' is not a time"),
        (("-c", "x", "--work", "many"), "--work: 'many' is no amount"),
        (("-c", "x", "--work", "3_0"), "--work: '3_0' is no amount"),
        (("-c", "x", "--work", "5:miles"), "--work: must be 'steps', 'epochs', 'samples' or 'tokens', not 'miles'"),
        (("-c", "x", "--progress", "log"), "--progress: log needs a pattern"),
        (("-c", "x", "--progress", "log:x"), "--progress: pattern needs a group"),
        (("-c", "x", "--name", "a b"), "--name: must be 1 to 63 letters"),
        (("-c", "x", "--label", "a"), "--label: 'a' is no KEY=VALUE"),
        (("-c", "x", "--env", "NOT_SET"), "--env: NOT_SET is not set here"),
        (("-c", "x", "--family", "cooking"), "--family: must be 'vision'"),
        (("-c", "x", "--priority", "200"), "--priority: must be at most 100, not 200"),
        (("-c", "x", "--processes", "two"), "--processes: must be 'per_gpu' or 'per_node', not 'two'"),
        (("bad.yaml",), r"bad.yaml: jobs\[1\].gpus.min: must be at least 1, not 0"),
        (("broken.yaml",), "broken.yaml: it is not YAML: line 1"),
        (("bad.yaml", "--gpus", "2"), "--gpus goes with a command or a script"),
        (("bad.yaml", "--", "x"), "bad.yaml is no script"),
        (("run.jl",), "run.jl does not say what runs it"),
        (("long.sh",), "a script may have 32,768"),
        (("--batch", "many", "-c", "x"), "^--batch: 'many' is no batch size; write 256, or 256-4096"),
        (("--batch", "64-32", "-c", "x"), "^--batch: max is smaller than min"),
        (("--batch", "64-128", "--work", "9:steps", "-c", "x"), "work must count samples, tokens or epochs"),
    ],
)
def test_bad_input_is_one_line_and_submits_nothing(
    run: Run, gateway: Gateway, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "bad.yaml").write_text("- {name: a, command: [x]}\n- {name: b, command: [x], gpus: {min: 0}}\n")
    (tmp_path / "broken.yaml").write_text("name: [")
    (tmp_path / "run.jl").write_text("print()\n")
    (tmp_path / "long.sh").write_text("true\n" * 7_000)
    before = len(gateway.pages("/v1/jobs", 500))

    with pytest.raises(CliError, match=says) as refused:
        run("submit", *words)

    assert refused.value.exit_code == EXIT_USAGE
    assert "\n" not in str(refused.value)
    assert "http" not in str(refused.value)
    assert len(gateway.pages("/v1/jobs", 500)) == before


def test_a_folder_that_is_not_there_is_refused_before_anything_is_submitted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{name: a, command: [x], working_dir: nowhere}")
    for words in (("-c", "x", "--workdir", "nowhere"), ("job.yaml",)):
        with pytest.raises(CliError, match="nowhere does not exist; choose another") as refused:
            run("submit", *words)
        assert refused.value.exit_code == EXIT_NOT_FOUND


@pytest.mark.parametrize(
    ("command", "shell"),
    [
        ("python3 train.py --x 'a b'", False),
        ("echo a | tee b", True),
        ("python3 train.py > log", True),
        ("cd src && make", True),
        ('echo "$HOME"', True),
        ("echo '$HOME'", False),
        (r"echo \$HOME", False),
        ("python3 -c 'print(1); print(2)'", False),
        ("A=1 python3 train.py", True),
        ("rm *.tmp", True),
        ("python3 train.py --lr=0.1", False),
        ("exit 3", True),
        (". ./env", True),
        ("python3 exit", False),
    ],
)
def test_a_command_with_shell_syntax_is_run_by_a_shell(command: str, shell: bool) -> None:
    assert needs_shell(command) is shell


def test_help_and_completion_read_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["submit", "nowhere.sh", "--help"], standalone_mode=False) == 0
    assert "--gpus" in capsys.readouterr().out


def test_a_range_of_batches_is_a_permission(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\n#WATTSHIFT --gpus 1-4 --batch 64-1024 --work 1e6:samples\ntrue\n")
    (tmp_path / "jobs.yaml").write_text("name: a\ncommand: ['true']\nbatch: {min: 64, max: 1024}\nglobal_batch: 128\n")
    by_option = submitted(run, gateway, "--batch", "64-1024", "-c", "true")
    by_script = submitted(run, gateway, "train.sh")
    by_file = submitted(run, gateway, "jobs.yaml")

    assert [each["batch"] for each in (by_option, by_script, by_file)] == [{"min": 64, "max": 1_024}] * 3
    assert [each.get("global_batch") for each in (by_option, by_script, by_file)] == [None, None, 128]


RUN_SH = "#!/bin/sh\necho $1\n"


@pytest.mark.parametrize(
    ("typed", "command", "gpus"),
    [
        ("python3 train.py", "python3 train.py", 1),
        ("--gpus 2 python3 train.py --lr 0.1 --gpus 9", "python3 train.py --lr 0.1 --gpus 9", 2),
        ("python3 -c 'print(1)'", "python3 -c 'print(1)'", 1),
        ("--gpus 2 python3 train.py -- --lr 0.1", "python3 train.py -- --lr 0.1", 2),
        ("python3 -- train.py", "python3 train.py", 1),
        ("train.py", "python3 train.py", 1),
        ("train.py 'a b' -- c", "python3 train.py 'a b' c", 1),
        ("--gpus=2 train.py --lr 0.1 -x", "python3 train.py --lr 0.1 -x", 2),
        ("train.py --gpus 2 -- --lr 0.1", "python3 train.py --lr 0.1", 2),
        ("--workdir src src/sub.py 1", "python3 sub.py 1", 1),
        ("--upload . src/sub.py", "python3 src/sub.py", 1),
        ("run.sh 'a b'", shlex.join(["sh", "-c", RUN_SH, "run.sh", "a b"]), 1),
        ("--gpus 2 run.sh", shlex.join(["sh", "-c", RUN_SH, "run.sh"]), 2),
        ("./elf --help", "elf --help", 1),
        ("only-on-nodes train.py", "only-on-nodes train.py", 1),
    ],
)
def test_command_lines_are_typed_as_for_sbatch_and_srun(
    run: Run, gateway: Gateway, files: Path, typed: str, command: str, gpus: int
) -> None:
    spec = submitted(run, gateway, *shlex.split(typed))

    assert [Path(spec["command"][0]).name, *spec["command"][1:]] == shlex.split(command)
    assert spec["gpus"]["min"] == gpus


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("train.py", "src/sub.py"):
        (tmp_path / name).write_text("print()\n")
    (tmp_path / "run.sh").write_text(RUN_SH)
    (tmp_path / "elf").write_bytes(b"\x7fELF\0")
    (tmp_path / "elf").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "words", "left_out"),
    [
        ("run.sh x --hold", "--hold run.sh -- x", ""),
        ("train.py --lr 0.1 --gpus 2", "--gpus 2 train.py -- --lr 0.1", ""),
        ("--gres=gpu:2 run.sh x", "--gpus 2 --processes per_node run.sh x", ""),
        ("--gpus 2 -J big -p gpu -t 1 train.py", "--gpus 2 --name big --time 60s train.py", "-p gpu"),
        ("sbatch --gpus=2 --time=1 run.sh x", "--gpus 2 --processes per_node --time 60s run.sh x", ""),
        ("srun -G2 --exclusive python3 train.py", "--gpus 2 --processes per_node python3 train.py", "--exclusive"),
    ],
)
def test_what_is_not_clear_or_slurms_is_answered_with_the_line_that_works(
    run: Run, gateway: Gateway, files: Path, typed: str, words: str, left_out: str
) -> None:
    with pytest.raises(CliError) as refused:
        run("submit", *shlex.split(typed))

    _, line, *further = str(refused.value).splitlines()

    assert line.strip() == f"wattshift submit {words}"
    assert further == ([f"which leaves this out: {left_out}"] if left_out else [])
    spec = submitted(run, gateway, *shlex.split(line)[2:])
    assert (spec["gpus"]["min"], spec["hold"]) == (2 if "2" in typed else 1, "--hold" in typed)


def test_two_files_of_specs_are_two_submissions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\ncommand: ['true']\n")
    with pytest.raises(CliError, match="one FILE of specs at a time, not 2"):
        run("submit", "a.yaml", "a.yaml")


class Refusing:
    """A gateway that takes one batch of jobs and refuses the next."""

    def __init__(self) -> None:
        self.taken = 0

    def call(self, _: str, path: str, *, body: Any, key: str) -> Any:
        if self.taken:
            raise CliError("too many jobs", EXIT_REFUSED)
        self.taken = len(body.jobs)
        return {"jobs": [{"id": f"job_{number}"} for number in range(self.taken)]}


def test_jobs_that_were_accepted_before_a_batch_was_refused_are_named() -> None:
    specs = [JobSpec(name="a", command=["true"])] * (MAX_BATCH_JOBS + 1)

    with pytest.raises(CliError, match="too many jobs") as refused:
        submit_all(Refusing(), specs, "key")  # type: ignore[arg-type]

    assert refused.value.exit_code == EXIT_REFUSED
    assert f"{MAX_BATCH_JOBS} of {MAX_BATCH_JOBS + 1} jobs are accepted" in str(refused.value)
    assert "--idempotency-key key" in str(refused.value)
