"""What this node has learned of its kinds of model servers, on disk, so that a restart does not begin from scratch.

One file per kind, written whole every ``SAVE_EVERY`` samples and when the agent ends: an agent that is killed loses the
samples since. Models are fitted to the samples when they are read. At most ``MOST_KINDS`` are kept, those that were
written last. A file that is broken, or of another version, is ignored and overwritten.
"""

import asyncio
import hashlib
import math
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, Field, PositiveFloat

from gpu_agent import files
from services.core.domain.serving import LatencyLimits
from services.core.policies.freesh.clock_model import MEMORY, ClockLearner, ClockSample
from services.core.policies.freesh.miad import LatencyReport
from services.kit.logging import Log

log = Log(__name__)

MOST_KINDS = 64
MOST_BYTES = 1 << 20  #: Of a file; one of ``MEMORY`` samples has a tenth of that
SAVE_EVERY = 30


@dataclass(frozen=True)
class ServerKind:
    """Servers that are assumed to respond to their clock alike; ``gpus`` and ``gpu_model``: what it runs on."""

    command: tuple[str, ...]
    image: str | None
    environment: tuple[tuple[str, str], ...]
    gpus: int
    gpu_model: str
    driver: str  #: The devices' driver: simulated devices teach nothing about real ones
    limits: LatencyLimits  #: The limits of the class that they serve, whose requests have a typical length

    @property
    def digest(self) -> str:
        """The name of its file, which does not reveal the process's arguments and variables: they may be secret."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:32]


@dataclass
class _Known:
    learner: ClockLearner
    unsaved: int = 0


class LearnedClocks:
    """The learners of a node, by kind of server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[ServerKind, _Known] = {}
        self._is_failing = False

    def learner(self, kind: ServerKind, sample: ClockSample | None = None) -> ClockLearner:
        """Return what is known of a kind, with a sample added if there is one."""
        known = self._known.pop(kind, None) or _Known(ClockLearner(self._read(kind)))
        self._known[kind] = known  # the one used last comes last
        if len(self._known) > MOST_KINDS:
            del self._known[next(iter(self._known))]
        if sample is not None:
            known.unsaved += known.learner.add(sample)
        return known.learner

    async def save(self, *, everything: bool = False) -> None:
        """Write the kinds with enough new samples or, with ``everything``, with any."""
        enough = 1 if everything else SAVE_EVERY
        for kind, known in list(self._known.items()):
            if known.unsaved < enough:
                continue
            content, known.unsaved = _document(kind, known.learner), 0
            try:
                await asyncio.to_thread(self._write, kind, content)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.warning("clocks.not_saved", error=str(error))
                self._is_failing = True

    def _path(self, kind: ServerKind) -> Path:
        return self._folder / f"{kind.digest}.json"

    def _write(self, kind: ServerKind, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(self._path(kind), content, durable=False)
        written = sorted(self._folder.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in written[:-MOST_KINDS]:
            path.unlink(missing_ok=True)

    def _read(self, kind: ServerKind) -> list[ClockSample]:
        path = self._path(kind)
        is_small = not path.exists() or path.stat().st_size <= MOST_BYTES
        samples = files.read(path, _samples, "clocks.unreadable") if is_small else None
        if samples:
            log.info("clocks.remembered", gpu_model=kind.gpu_model, gpus=kind.gpus, samples=len(samples))
        return samples or []


def _document(kind: ServerKind, learner: ClockLearner) -> bytes:
    samples = map(astuple, learner.samples)
    rows = [[clock_mhz, batch, *report[:3], *rest] for clock_mhz, batch, report, *rest in samples]
    shown = {"version": 1, "gpu_model": kind.gpu_model, "gpus": kind.gpus, "samples": rows}
    return orjson.dumps(shown)  # a power that is unknown (NaN) is written as null


class _Row(NamedTuple):
    """The fields of a ``ClockSample``, those of its report in the place of that."""

    clock_mhz: PositiveFloat
    batch: PositiveFloat
    ttft_s: float | None
    tbt_s: PositiveFloat
    e2e_s: float | None
    power_w: float | None
    queued_s: float
    tokens_per_request: float | None
    tokens_per_s: float
    busy_share: float


class _Document(BaseModel):
    version: Literal[1]
    samples: list[_Row] = Field(max_length=MEMORY)


def _samples(document: Any) -> list[ClockSample]:
    """Return the samples of a file; ``ValueError`` if it is not such a file, or of another version."""
    return [
        ClockSample(*row[:2], LatencyReport(*row[2:5]), math.nan if row.power_w is None else row.power_w, *row[6:])
        for row in _Document.model_validate(document).samples
    ]
