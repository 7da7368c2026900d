"""What this node has learned of its kinds of model servers, on disk, so that a restart does not begin from scratch.

One file per kind, written whole every ``SAVE_EVERY`` samples and when the agent ends: an agent that is killed loses the
samples since. Models are fitted to the samples when they are read. At most ``MOST_KINDS`` are kept, those that were
written last. A file that is broken, or of another version, is ignored and overwritten.
"""

import asyncio
import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from gpu_agent import files
from services.core.domain.serving import LatencyLimits
from services.core.policies.freesh.clock_model import MEMORY, ClockLearner, ClockSample
from services.core.policies.freesh.miad import LatencyReport
from services.kit.logging import Log

log = Log(__name__)

VERSION = 1
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

    def learner(self, kind: ServerKind) -> ClockLearner:
        return self._find(kind).learner

    def add(self, kind: ServerKind, sample: ClockSample) -> ClockLearner:
        """Add a sample to what is known of a kind, and return the result."""
        known = self._find(kind)
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

    def _find(self, kind: ServerKind) -> _Known:
        known = self._known.pop(kind, None) or _Known(ClockLearner(self._read(kind)))
        self._known[kind] = known  # the one used last comes last
        if len(self._known) > MOST_KINDS:
            del self._known[next(iter(self._known))]
        return known

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
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            samples = _samples(content)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("clocks.unreadable", file=str(path), error=str(error) or type(error).__name__)
            return []
        log.info("clocks.remembered", gpu_model=kind.gpu_model, gpus=kind.gpus, samples=len(samples))
        return samples


def _document(kind: ServerKind, learner: ClockLearner) -> bytes:
    rows = [
        [
            each.clock_mhz, each.batch, each.report.ttft_s, each.report.tbt_s, each.report.e2e_s, each.power_w,
            each.queued_s, each.tokens_per_request, each.tokens_per_s, each.busy_share,
        ]
        for each in learner.samples
    ]  # fmt: skip
    shown = {"version": VERSION, "gpu_model": kind.gpu_model, "gpus": kind.gpus, "samples": rows}
    return orjson.dumps(shown)  # a power that is unknown (NaN) is written as null


def _samples(content: bytes) -> list[ClockSample]:
    """Return the samples of a file.

    Raises:
        ValueError, KeyError, TypeError: It is not such a file, or of another version.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    document: Any = orjson.loads(content)
    if not isinstance(document, Mapping):
        raise ValueError("it is not an object")
    if document["version"] != VERSION:
        raise ValueError(f"it has version {document['version']!r}, not {VERSION}")
    if len(document["samples"]) > MEMORY:
        raise ValueError(f"it has more than {MEMORY} samples")
    return [_sample(row) for row in document["samples"]]


def _sample(row: Any) -> ClockSample:
    clock, batch, ttft, tbt, e2e, power, queued, per_request, per_s, busy = row
    found = ClockSample(
        clock_mhz=float(clock),
        batch=float(batch),
        report=LatencyReport(_number(ttft), float(tbt), _number(e2e)),
        power_w=math.nan if power is None else float(power),
        queued_s=float(queued),
        tokens_per_request=_number(per_request),
        tokens_per_s=float(per_s),
        busy_share=float(busy),
    )
    if not (found.clock_mhz > 0 and found.batch > 0 and tbt > 0):
        raise ValueError(f"it has a sample without a clock, requests or tokens: {row}")
    return found


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
