"""Fields of stored job specifications, as SQL.

A specification is stored as it was accepted, without null values and without the fields of later releases. Each
expression reads one field of the ``spec`` of a row ``j`` of ``jobs`` and fills in the default that `JobSpec` declares,
so that no query states a default of its own.
"""

from typing import Literal

from services.contracts.jobs import JobSpec

SqlType = Literal["bool", "float8", "int", "text", "timestamptz"]


def spec_field(path: str, sql_type: SqlType) -> str:
    """Return an expression for one field, such as ``gpus.min``; where it is not stored, its default or null.

    Raises:
        KeyError: `JobSpec` has no such field.
        TypeError: Its default has no SQL literal here.
    """
    first, *rest = path.split(".")
    default: object = JobSpec.model_fields[first].get_default(call_default_factory=True)
    for name in rest:
        default = getattr(default, name) if default is not None else None
    stored = f"(j.spec #>> '{{{','.join((first, *rest))}}}')::{sql_type}"
    match default:
        case None:
            return stored
        case bool():
            return f"coalesce({stored}, {str(default).lower()})"
        case int() | float():
            return f"coalesce({stored}, {default!r})"
        case _:
            raise TypeError(f"the default of {path} is {default!r}")


MIN_GPUS = spec_field("gpus.min", "int")
MAX_GPUS = f"coalesce({spec_field('gpus.max', 'int')}, {MIN_GPUS})"
"""As ``GpuRequest.largest``: a job that names no largest gang is of fixed size."""
STEP_GPUS = spec_field("gpus.step", "int")
ASKED_GPUS = f"coalesce({spec_field('gpus.asked', 'int')}, {MIN_GPUS})"
GPU_MODEL = spec_field("gpus.model", "text")
SLICE = spec_field("gpus.slice", "text")
GPU_MEMORY_GIB = spec_field("gpus.memory_gib", "float8")
GPU_ZONE = spec_field("gpus.zone", "text")
GPU_WITHIN = spec_field("gpus.within", "text")
GPU_NEAR = spec_field("gpus.near", "text")
WORK_TOTAL = spec_field("work.total", "float8")
PREEMPTIBLE = spec_field("preemptible", "bool")
MAY_SHARE_GPU = spec_field("may_share_gpu", "bool")
MAY_MOVE = spec_field("may_move", "bool")
FLEX = spec_field("flex", "float8")
PRIORITY = spec_field("priority", "int")
DEADLINE = spec_field("deadline", "timestamptz")
GRACE_S = spec_field("grace_s", "float8")
MAX_RESTARTS = spec_field("max_restarts", "int")
RESTART_AFTER_NODE_LOSS = spec_field("restart_after_node_loss", "bool")
GLOBAL_BATCH = spec_field("global_batch", "float8")
FAMILY = spec_field("family", "text")
BATCH_MIN = spec_field("batch.min", "int")
BATCH_MAX = spec_field("batch.max", "int")
CHECKPOINT_DIR = spec_field("checkpoint_dir", "text")
