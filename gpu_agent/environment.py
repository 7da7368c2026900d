"""The environment of a job's process. It starts empty, so that nothing else of the agent's reaches a job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.contracts.commands import StartGang

PASSED = frozenset(
    (
        *(
            "PATH",
            "HOME",
            "USER",
            "LOGNAME",
            "SHELL",
            "LANG",
            "LANGUAGE",
            "TZ",
            "TMPDIR",
            "LD_LIBRARY_PATH",
            "CUDA_HOME",
            "CUDA_PATH",
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    )
)
"""Variables of the agent's own environment that every process needs; beside them ``LC_*``."""


@dataclass(frozen=True)
class RankPaths:
    """Paths of the files through which the agent and the job communicate."""

    checkpoint_dir: str
    progress_file: str
    progress_url: str
    device_file: str


def job_variables(start: StartGang, paths: RankPaths) -> dict[str, str]:
    """Return the variables that describe the gang; a job cannot replace them."""
    serves_at = {} if start.spec.service is None else {"WATTSHIFT_PORT": str(start.master_port)}
    return serves_at | {
        "WATTSHIFT_JOB_ID": start.job_id,
        "WATTSHIFT_ALLOCATION_ID": start.allocation_id,
        "WATTSHIFT_GENERATION": str(start.generation),
        "WATTSHIFT_NNODES": str(start.nnodes),
        "WATTSHIFT_RANK_OFFSET": str(start.rank_offset),
        "WATTSHIFT_LOCAL_WORLD_SIZE": str(len(start.devices)),
        "WATTSHIFT_CHECKPOINT_DIR": paths.checkpoint_dir,
        "WATTSHIFT_PROGRESS_FILE": paths.progress_file,
        "WATTSHIFT_PROGRESS_URL": paths.progress_url,
        "WATTSHIFT_DEVICE_FILE": paths.device_file,
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "WORLD_SIZE": str(start.world_size),
        "NODE_RANK": str(start.node_rank),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, start.devices)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, which device indices are in
    }


def passed_environment(also_passed: Iterable[str] = (), own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of the agent's own environment that its children get.

    Args:
        also_passed: Names of further variables that they get on this site.
        own: The agent's environment.
    """
    names = PASSED | set(also_passed)
    passed = {name: value for name, value in own.items() if name in names or name.startswith("LC_")}
    passed.setdefault("PATH", os.defpath)
    return passed
