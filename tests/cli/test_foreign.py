"""Scripts written for other schedulers: what is obeyed, what is named, and who wins."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import CliError
from services.cli.jobs import submit
from services.cli.jobs.foreign import obeyed
from services.cli.jobs.scripts import read_script
from services.cli.main import app
from services.cli.values import duration_s
from tests.cli.conftest import NotingGateway


class Accepting(NotingGateway):
    """Accepts every job."""

    url = "http://gateway.test"

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        """Note a job and accept it."""
        self.calls.append((method, path, body))
        return {"id": "job-1", "name": "a", "state": "queued"}


def asked(*lines: str, given: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Return what lines of a script ask for, and what is said of them."""
    script = read_script("a.sh", "#!/bin/bash\n" + "".join(f"{line}\n" for line in lines) + "true\n")
    options, said = obeyed("a.sh", script.text, script.foreign, given)
    return " ".join(options), said


def spec_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Submit one job and return its spec as it was sent."""
    gateway = Accepting()
    monkeypatch.setattr(submit, "Gateway", gateway)
    app(["submit", *words], standalone_mode=False)
    return json.loads(gateway.calls[-1][2].model_dump_json())


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        (["#SBATCH --gpus=4"], "--gpus 4"),
        (["#SBATCH -G 4"], "--gpus 4"),
        (["#SBATCH --gres=gpu:2"], "--gpus 2"),
        (["#SBATCH --gres gpu   # one"], "--gpus 1"),
        (["#SBATCH --gpus=1 --nodes=1 --ntasks=1 --ntasks-per-node=1"], "--gpus 1"),
        (["#SBATCH --gpus=2", "#SBATCH --gres=gpu:2"], "--gpus 2"),
        (["#SBATCH --gpus=8", "#SBATCH --gpus=2"], "--gpus 2"),
    ],
)
def test_gpus_have_an_exact_meaning(lines: list[str], options: str) -> None:
    assert asked(*lines) == (f"{options} --processes per_node", [])


@pytest.mark.parametrize(
    ("lines", "gpus", "said"),
    [
        (["#SBATCH -N2 --gpus-per-node=4"], 8, ["line 2: -N2 (a gang may lie on any number of nodes"]),
        (["#SBATCH --nodes=2", "#SBATCH --gres=gpu:4"], 8, ["line 2: --nodes=2 (a gang may lie"]),
        (["#SBATCH -n 4 --gpus-per-task=2"], 8, ["line 2: -n 4 (the script runs once on each node)"]),
        (
            ["#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-task=1"],
            4,
            ["line 2: --nodes=2 (a gang", "line 2: --ntasks-per-node=2 (the script"],
        ),
        (["#SBATCH --gres=gpu:a100:2"], 2, ["line 2: --gres=gpu:a100:2 (it gets 2 GPUs, of any type)"]),
        (["#SBATCH --gpus=h100:2"], 2, ["line 2: --gpus=h100:2 (it gets 2 GPUs, of any type)"]),
        (["#SBATCH --gres=gpu:2,nvme:1"], 2, ["line 2: --gres=gpu:2,nvme:1 (it gets"]),
        (["#SBATCH --gpus=2", "#SBATCH --gres=gpu:4"], 2, ["line 3: --gres=gpu:4 (it gets 2"]),
        (["#SBATCH --nodes=1 --gpus=4"], 4, ["line 2: --nodes=1 (a gang may lie"]),
        (["#SBATCH --nodes=2-4 --gpus-per-node=4"], 0, ["line 2: --gpus-per-node=4", "line 2: --nodes=2-4", "it asks"]),
        (["#SBATCH --gres=gpu:a100:2,gpu:h100:2"], 0, ["line 2: --gres=gpu:a100:2,gpu:h100:2", "it asks for no"]),
        (["#SBATCH --mem=32G"], 0, ["line 2: --mem=32G", "it asks for no number of GPUs that is understood, and gets"]),
    ],
)
def test_what_is_not_exact_is_named(lines: list[str], gpus: int, said: list[str]) -> None:
    options, found = asked(*lines)

    assert options == (f"--gpus {gpus} --processes per_node" if gpus else "")
    assert len(found) == len(said)
    assert all(each.startswith(begin) for each, begin in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("30", 1_800), ("01:30", 90), ("2:00:00", 7_200), ("1-0", 86_400), ("1-06:30", 109_800)),
        *(("1-00:00:30", 86_430), ("90:00", 5_400), ("UNLIMITED", 0), ("infinite", 0), ("0", 0)),
    ],
)
def test_a_time_of_sbatch_has_the_meaning_that_slurm_gives_it(time: str, seconds: int) -> None:
    for line in (f"#SBATCH --time={time}", f"#SBATCH -t {time}"):
        assert asked("#SBATCH -G1", line, given=("gpus",)) == (f"--time {seconds}s" if seconds else "", [])


def test_the_rest_of_what_has_a_meaning_here() -> None:
    assert asked(
        *("#SBATCH --gpus=1", "#SBATCH --array=0-9%2 --job-name=sweep --chdir /data/x", "#SBATCH -H"),
        "#SBATCH --dependency=afterok:prepare:job-12,afterany:other,afternotok:third",
        given=("gpus",),
    ) == (
        "--array 0-9%2 --name sweep --workdir /data/x --hold "
        "--after ok:prepare --after ok:job-12 --after any:other --after not_ok:third",
        [],
    )


OTHERS = (
    *("--mem=32G", "--cpus-per-task 8", "-p gpu", "--open-mode=append", "--exclusive", "--qos=high", "--time=soon"),
    *("--dependency=singleton", "--dependency=afterok:1?afterok:2", "--begin=now+1hour", "stray"),
)


def test_other_schedulers_and_parts_of_heterogeneous_jobs_are_named_line_by_line() -> None:
    lines = ("#PBS -l walltime=1:00:00", "#BSUB\t-n 4", "#SBATCH --gpus=2", "#SBATCH hetjob", "#SBATCH --gpus=8")

    options, said = asked(*lines)

    assert options == "--gpus 2 --processes per_node"
    assert said == [f"line {at}: {lines[at - 2]}" for at in (2, 3, 5, 6)]


def test_only_lines_that_slurm_reads_count() -> None:
    assert asked("##SBATCH --gpus=2", "# SBATCH --gpus=2", "#SBATCHES --gpus=2", "", "true", "#SBATCH --gpus=2") == (
        "",
        [],
    )


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--export=ALL", "--env *"),
        ("--export=ALL,A=1,HOME", "--env * --env A=1 --env HOME"),
        ("--export=NONE", "--clean-env"),
        ("--export=A=1", "--clean-env --env A=1"),
        ("-o %x-%j.out --error=%A_%a.err", "--output %x-%j.out --error %A_%a.err"),
        ("--mail-type=NONE", ""),
        ("--mail-type=END,FAIL", "--notify ended,failed"),
        ("--mail-type=begin", "--notify started"),
        ("--mail-type=ALL,TIME_LIMIT,ARRAY_TASKS", "--notify started,ended,failed"),
    ],
)
def test_variables_and_files_have_a_meaning(line: str, options: str) -> None:
    assert asked("#SBATCH --gpus=1", f"#SBATCH {line}", given=("gpus", "env")) == (options, [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *((line, "") for line in OTHERS),
        (
            "--mail-type=END,TIME_LIMIT_80",
            "of the events, NONE, BEGIN, END, FAIL, TIME_LIMIT, ALL, ARRAY_TASKS have a meaning here",
        ),
        (
            "--mail-user=me@example.org",
            "no mail is sent; messages go to a webhook, which `wattshift webhooks create URL` makes",
        ),
        ("--output=a.%s", "of patterns, a file's name may have %j, %A, %a, %x, %u, %N and %%"),
        ("--export=ALL,NOT_SET_HERE", "a variable that it names is not set here"),
    ],
)
def test_every_other_line_is_named_with_the_reason_if_it_has_one(line: str, why: str) -> None:
    said = f"line 3: {line} ({why})" if why else f"line 3: {line}"
    assert asked("#SBATCH --gpus=1", f"#SBATCH {line}", given=("gpus",)) == ("", [said])


def test_pbs_is_obeyed_and_named_where_not() -> None:
    assert asked(
        "#PBS -N a -l select=1:ngpus=1,walltime=1:30:00 -J 0-9:3%2",
        "#PBS -j oe -o logs/ -d /data -h -v A=1,B=2 -W depend=afterok:12:x,afterany:y",
    ) == (
        "--gpus 1 --processes per_node --name a --time 5400s --array 0-9:3%2 --output logs/%x.o%A --workdir /data "
        "--hold --clean-env --env A=1 --env B=2 --after ok:12 --after ok:x --after any:y",
        [],
    )
    assert asked("#PBS -l nodes=2:ppn=4:gpus=2 -q gpu", "#PBS -l mem=4gb,walltime=90 -m ae -V -v A=1") == (
        "--gpus 4 --processes per_node --time 90s --notify failed,ended --env * --env A=1",
        [
            "line 2: -l nodes=2:ppn=4:gpus=2 (a gang may lie on any number of nodes, and the script runs once on each)",
            "line 2: -l nodes=2:ppn=4:gpus=2 (not obeyed: ppn=4)",
            "line 2: -q gpu",
            "line 3: -l mem=4gb",
        ],
    )


def test_lsf_is_obeyed_and_named_where_not() -> None:
    assert asked(
        '#BSUB -J "sweep[1-9:2]%3" -W 1:30 -n 1 -gpu num=2 -oo out.%J.%I -cwd /data -H',
        '#BSUB -w \'done(12) && ended("prep") && exit(x)\' -env "all, A=1"',
    ) == (
        "--gpus 2 --processes per_node --name sweep --array 1-9:2%3 --time 5400s --output out.%A.%a --workdir /data "
        "--hold --after ok:12 --after any:prep --after not_ok:x --env * --env A=1",
        [],
    )
    assert asked("#BSUB -gpu num=1 -N", "#BSUB -B") == ("--gpus 1 --processes per_node --notify ended,started", [])
    assert asked("#BSUB -W 90 -R 'rusage[ngpus_physical=2] span[hosts=1]' -q a", "#BSUB -w 'done(1) || done(2)'") == (
        "--gpus 2 --processes per_node --time 5400s",
        [
            "line 2: -R rusage[ngpus_physical=2] span[hosts=1] (only the number of GPUs is obeyed)",
            "line 2: -q a",
            "line 3: -w done(1) || done(2)",
        ],
    )


def test_the_folder_it_was_submitted_in_and_calls_of_srun_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "#!/bin/bash\n#PBS -l ngpus=1\ncd $PBS_O_WORKDIR\nsrun python3 a.py\n"
    monkeypatch.setenv("PATH", "")
    read = read_script("a.sh", script)

    options, said = obeyed("a.sh", script, read.foreign, ())

    assert options[-2:] == ["--env", f"PBS_O_WORKDIR={Path.cwd()}"]
    assert said == [
        "it calls srun, which is not here: let it start the program itself, by --processes per_gpu once a GPU"
    ]
    assert obeyed("a.sh", script, read.foreign, ("upload",))[1][0].startswith("it reads PBS_O_WORKDIR, not set here")


def test_every_variable_but_those_of_the_control_plane_may_be_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WATTSHIFT_API_KEY", "secret")

    spec = spec_of(monkeypatch, "--env", "*", "--env", "NCCL_DEBUG=WARN", "true")
    assert (spec["environment"]["NCCL_DEBUG"], "HOME" in spec["environment"]) == ("WARN", "HOME" in os.environ)
    assert not [name for name in spec["environment"] if name.startswith("WATTSHIFT_")]
    assert spec_of(monkeypatch, "--env", "NCCL*", "--clean-env", "true")["environment"] == {"NCCL_DEBUG": "INFO"}


def test_variables_of_slurm_that_the_script_reads_are_named() -> None:
    _, said = asked("#SBATCH --gpus=1 --array=0-9", "echo $SLURM_ARRAY_TASK_ID ${SLURM_JOB_ID}")

    assert said == ["it reads SLURM_ARRAY_TASK_ID, SLURM_JOB_ID, not set here (WATTSHIFT_ARRAY_INDEX is)"]


def test_own_lines_win_over_those_of_slurm_and_what_is_typed_over_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "#!/bin/bash\n#SBATCH --gpus=4 --time=1-00:00:00 --array=0-9%2 -d afterok:a\n#SBATCH --mem=1G -J 'my sweep'\n"
    )
    script = tmp_path / "a.sbatch"
    script.write_text(text + "echo hi\n")
    spec = spec_of(monkeypatch, "a.sbatch")
    assert (spec["gpus"]["min"], spec["gpus"]["max"], spec["processes"]) == (4, 4, "per_node")
    assert (spec["time_limit_s"], spec["array"], spec["name"]) == (86_400.0, "0-9%2", "my-sweep")
    assert spec["after"]["ok"] == ["a"]
    assert capsys.readouterr().err.splitlines()[0] == "wattshift: a.sbatch is not obeyed in all: line 3: --mem=1G"

    script.write_text(text + "#WATTSHIFT --gpus 2 --time 1h --after any:b\necho hi\n")
    spec = spec_of(monkeypatch, "a.sbatch")
    assert (spec["gpus"]["min"], spec["processes"], spec["time_limit_s"]) == (2, None, 3_600.0)
    assert (spec["after"]["ok"], spec["after"]["any"]) == (None, ["b"])

    spec = spec_of(monkeypatch, "a.sbatch", "--gpus", "1-8", "--time", "01:30", "--name", "x")
    assert (spec["gpus"]["max"], spec["time_limit_s"], spec["name"]) == (8, 5_400.0, "x")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_script_is_read_as_editors_write_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str) -> None:
    monkeypatch.chdir(tmp_path)
    text = "#!/bin/bash\r\n#SBATCH --gpus=4\r\n#WATTSHIFT --label kind=é\r\necho hi\r\n"
    (tmp_path / "a.sh").write_bytes(text.encode(encoding))
    (tmp_path / "env").write_bytes("A=1\r\nB=é\r\n".encode(encoding))

    spec = spec_of(monkeypatch, "a.sh", "--env-file", "env")

    assert (spec["gpus"]["min"], spec["labels"]["kind"], spec["command"][2]) == (4, "é", text.replace("\r\n", "\n"))
    assert (spec["environment"]["A"], spec["environment"]["B"]) == ("1", "é")


def test_a_spec_may_have_a_byte_order_mark_and_other_bytes_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.json", '{"name": "a", "command": ["true"]}'), ("a.yaml", "{name: a, command: ['true']}\n")):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + text.encode())
        assert spec_of(monkeypatch, name)["command"] == ["true"]
    (tmp_path / "a.sh").write_bytes(b"#!/bin/sh\necho \xf6\n")
    with pytest.raises(CliError, match="it is neither UTF-8 nor UTF-16 text"):
        spec_of(monkeypatch, "a.sh")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("01:30", 5_400), ("06:00:00", 21_600), ("30:00:00", 108_000)),
        *(("1-06:00:00", 108_000), ("10-00:00:05", 864_005), ("0-01:30", 5_400)),
    ],
)
def test_durations_keep_their_forms_and_may_have_days(text: str, seconds: float) -> None:
    assert duration_s(text, "--time") == seconds


@pytest.mark.parametrize("text", ["1-24:00:00", "1-", "-1:00", "1-2-03:00:00", "1-06"])
def test_other_forms_of_days_are_refused(text: str) -> None:
    with pytest.raises(CliError, match=r"write 90 \(seconds\), 90s, 15m, 1h30m, 2d, 06:00:00 or 1-06:00:00"):
        duration_s(text, "--time")
