"""Answers of the Slurm releases that were not run: every field of their published data parsers, in its type.

``python -m tests.engines.slurm_answers SLURM`` makes ``slurm-answers.json.gz`` from a clone of Slurm's sources. All it
takes from them are the fields' names and types; the values are ours, and a field of which we know none is unset.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FILE = Path(__file__).with_name("slurm-answers.json.gz")
RELEASES = {"23.02": 39, "23.11": 40, "24.05": 41, "24.11": 42, "25.05": 43, "25.11": 44}
"""Each release, and the number of the newest parser it has, which its commands use."""
BEGUN = {"submit_time": 1_700_000_000, "eligible_time": 1_700_000_000, "user_name": "ann", "requeue": True}
RUNS = {"job_state": "RUNNING", "start_time": 1_700_000_060, "end_time": 1_700_003_660, "nodes": "gpu[1-2]"}
WAITS = {"job_state": "PENDING", "state_reason": "Resources", "tres_req_str": "cpu=1,node=1,gres/gpu=1"}
JOBS: list[Json] = [
    {"job_id": 1, "name": "two nodes", "node_count": 2, "restart_cnt": 1, "tres_per_node": "gres/gpu:h200:2"}
    | RUNS
    | {"gres_detail": ["gpu:h200:2(IDX:0-1)", "gpu:h200:2(IDX:3,5)"], "admin_comment": "wattshift:1@1700000000"},
    {"job_id": 2, "name": "waits", "priority": 777, "nice": 50, "time_limit": 60, "comment": "wattshift:gpus=2-8"}
    | WAITS
    | {"tres_per_node": "gres/gpu:h200:2", "eligible_time": 1_700_001_217, "deadline": 1_700_090_000}
    | {"admin_comment": "wattshift:2@1700000000 wattshift-hold:1700001217/1700000600 theirs", "qos": "long"},
    {"job_id": 3, "name": "array", "array_job_id": 3, "array_task_string": "2-9", "array_max_tasks": 4} | WAITS,
    {"job_id": 4, "name": "array", "array_job_id": 3, "array_task_id": 1, "tres_alloc_str": "cpu=1,gres/gpu=1"}
    | RUNS
    | {"nodes": "gpu3", "gres_detail": ["gpu:h200:1(IDX:7)"]},
    {"job_id": 5, "name": "depends", "dependency": "afterok:3(unfulfilled)", "state_reason": "Dependency"} | WAITS,
    {"job_id": 6, "name": "limited", "tres_per_job": "gres/gpu:8"} | WAITS | {"state_reason": "QOSMaxGRESPerUser"},
    {"job_id": 7, "name": "het", "het_job_id": 7, "tres_per_task": "gres/gpu:1", "tasks": 4} | WAITS,
    {"job_id": 8, "name": "reserved", "resv_name": "course", "account": "bio"} | WAITS,
    {"job_id": 9, "name": "shell", "batch_flag": False, "partition": "batch,private"} | WAITS,
    {"job_id": 10, "name": "failed", "tres_alloc_str": "cpu=1,gres/gpu=1"} | RUNS | {"job_state": "FAILED"},
    {"job_id": 11, "name": "slices", "tres_per_node": "gres/gpu:1g.10gb:2"} | WAITS,
    {"job_id": 12, "name": "again", "restart_cnt": 2} | WAITS | {"state_reason": "BeginTime"},
]
JOBS = [{"batch_flag": True, "partition": "batch", "node_count": 1, "priority": 5} | BEGUN | row for row in JOBS]
FLAGS = {10: ["LAUNCH_FAILED"], 12: ["REQUEUED"]}
"""What jobs' states have besides, where they are lists."""
STATUS = {10: 3}  #: Exit statuses
NODES: list[Json] = [
    {"name": "gpu1", "state": ["MIXED"], "gres": "gpu:h200:8(S:0-1)", "partitions": ["batch", "private"]},
    {"name": "gpu2", "state": ["IDLE", "PLANNED"], "gres": "gpu:h200:8", "partitions": ["batch"]},
    {"name": "gpu3", "state": ["IDLE", "DRAIN"], "gres": "gpu:a100:4,gpu:t4:4", "reason": "fan", "partitions": []},
    {"name": "cpu1", "state": ["IDLE"], "gres": "", "partitions": ["batch"]},
]


def rendered(kind: str, value: Any) -> Any:
    """Return a value in the form of a type of the parsers; None: it is unset."""
    if kind.endswith("_NO_VAL"):
        return {"set": value is not None, "infinite": False, "number": value or 0}
    if kind == "PROCESS_EXIT_CODE":
        words = ["ERROR" if value else "SUCCESS"]
        return {"status": words, "return_code": rendered("UINT32_NO_VAL", value or 0), "signal": {"name": ""}}
    if value is not None:
        return value
    if re.match(r"U?INT|NICE|FLOAT|CORE|THREAD|TIME", kind):
        return 0
    if kind.startswith("BOOL") or kind == "HOLD":
        return False
    return [] if re.search("CSV|FLAGS|STATES|DETAIL|SHARED|PROFILE|EXCLUSIVE|PARTITION", kind) else ""


def row_of(fields: list[tuple[str, str]], values: Json) -> Json:
    """Return a row with all fields of a parser, nested where their names are paths."""
    row: Json = {}
    for kind, path in fields:
        *above, name = path.split("/")
        at = row
        for each in above:
            at = at.setdefault(each, {})
        at[name] = rendered(kind, values.get(path))
    return row


def fields_of(parsers: str, name: str) -> list[tuple[str, str]]:
    """Return the types and names of what a parser writes."""
    found = re.search(rf"PARSER_ARRAY\({name}\)\[\] = \{{(.*?)\n\}};", parsers, re.DOTALL)
    assert found
    fields: list[tuple[str, str]] = []
    for how, words in re.findall(r"(add_c?parse\w*)\((.*?)\),?\n", found[1]):
        parts = [each.strip() for each in words.split(",")]
        path = re.search(r'"([^"]+)"', words)
        assert path
        fields.append((parts[1] if "flag_array" in how else parts[0], path[1]))
    return fields


def answers_of(release: str, parsers: str) -> Json:
    """Return what ``squeue --json`` and ``scontrol show nodes --json`` of a release answer."""
    jobs: list[Json] = []
    for values in JOBS:
        status = STATUS.get(values["job_id"], 0)
        states = values["job_state"] if release == "23.02" else [values["job_state"], *FLAGS.get(values["job_id"], [])]
        codes = {"exit_code": status << 8 if release == "23.02" else status}
        jobs.append(row_of(fields_of(parsers, "JOB_INFO"), values | codes | {"job_state": states}))
    plugin = {"data_parser": f"data_parser/v0.0.{RELEASES[release]}", "accounting_storage": ""}
    meta = (
        {"plugins": plugin, "Slurm": {"release": f"{release}.1"}}
        if release == "23.02"
        else {"plugin": {"type": "", "name": "", **plugin}, "slurm": {"release": f"{release}.1", "cluster": "lab"}}
    )
    around = {"meta": meta, "warnings": [], "errors": []}
    nodes = [row_of(fields_of(parsers, "NODE"), values) for values in NODES]
    return {"jobs": {"jobs": jobs} | around, "nodes": {"nodes": nodes} | around}


def main(folder: str) -> None:
    """Write the file of answers."""
    found: Json = {}
    for release, version in RELEASES.items():
        path = f"slurm-{release}:src/plugins/data_parser/v0.0.{version}/parsers.c"
        done = subprocess.run(["git", "-C", folder, "show", path], capture_output=True, text=True, check=True)
        found[release] = answers_of(release, done.stdout)
    FILE.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
