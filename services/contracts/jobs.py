"""Training jobs: what a user asks for and what a job looks like afterwards."""

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from services.contracts.arrays import ARRAY_VARIABLES, After, ArrayTasks, ArrayText, TaskCounts, read_array
from services.contracts.grid import Flex
from services.contracts.launchers import is_launcher
from services.contracts.parallel import MAX_GANG_GPUS, ParallelLayout
from services.contracts.schema import LEAST, Flag, Instant, Int, Message, Name, Page, Real, Text, many, maybe, said
from services.contracts.secrets import MAX_SECRETS_OF_A_JOB, EnvironmentName, SecretUse
from services.contracts.sources import AbsolutePath, Source, absolute
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason

MAX_BATCH_JOBS = 1_000

LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=255)]
Argument = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=32_768)]


SliceName = Literal["1g", "2g", "3g", "4g", "7g"]  #: A MIG slice by its size, in sevenths of a GPU


class GpuRequest(Message):
    """The sizes the gang may have: `min`, `min + step`, ... `max`."""

    min: Int = Field(default=1, ge=1, le=MAX_GANG_GPUS)
    max: Int | None = maybe("By default `min`: a job of fixed size.", ge=1, le=MAX_GANG_GPUS)
    step: Int = Field(default=1, ge=1, le=MAX_GANG_GPUS)
    asked: Int | None = maybe(
        "The size that you would ask for if the gang had only one: what `joint` measures by whether other "
        "sizes are worth it. By default `min`.",
        ge=1,
        le=MAX_GANG_GPUS,
    )
    model: Name | None = maybe("GPU model that the job needs, as nodes report it.")
    memory_gib: Real | None = maybe("Minimum memory of each device.", ge=LEAST, le=10_000)
    zone: Name | None = maybe("Grid zone to stay in, as with data that are there; by default any.")
    within: Name | None = maybe(
        "Level of the network, such as `rack`, in one domain of which the whole gang must lie; it waits until one has "
        "room. `node` is always one; `GET /v1/topology` lists them."
    )
    near: Name | None = maybe("The same, where that delays it no more than any other place: it should, but need not.")
    slice: SliceName | None = maybe(
        "Size of the MIG slice that the job needs instead of a GPU, in sevenths of one. It gets one."
    )

    @property
    def largest(self) -> int:
        """The largest gang, with the default filled in."""
        return self.min if self.max is None else self.max

    @model_validator(mode="after")
    def _sizes_exist(self) -> Self:
        if self.largest < self.min:
            raise ValueError("max is smaller than min")
        if (self.largest - self.min) % self.step:
            raise ValueError("max is not min plus a whole number of steps")
        asked = self.min if self.asked is None else self.asked
        if not self.min <= asked <= self.largest or (asked - self.min) % self.step:
            raise ValueError("asked is not one of the sizes from min to max")
        if self.slice is not None and self.largest > 1:
            raise ValueError("a job on a slice has one: leave out min and max, or set them to 1")
        return self


class BatchRange(Message):
    """The total batch sizes that a policy may choose from; the training code reads the chosen one."""

    min: Int = said("Samples per step of the whole gang.", ge=1, le=10**9)
    max: Int = Field(ge=1, le=10**9)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.max < self.min:
            raise ValueError("max is smaller than min")
        return self


class Work(Message):
    """How much work the job has in total; progress and energy efficiency are measured against it."""

    total: Real = Field(ge=LEAST, le=1e15)
    unit: Literal["steps", "epochs", "samples", "tokens"] = "steps"


class Progress(Message):
    """How the job reports its progress.

    `file`: the job writes JSON lines `{"done": number}` to `$WATTSHIFT_PROGRESS_FILE`; the last line counts.
    `log`: `pattern` is searched in standard output; its groups `done` and, optionally, `total` match numbers.
    `http`: the job posts `{"done": number}` to `$WATTSHIFT_PROGRESS_URL`.
    """

    source: Literal["file", "log", "http", "none"] = "file"
    pattern: Text | None = Field(default=None, max_length=500)

    @model_validator(mode="after")
    def _pattern_fits_source(self) -> Self:
        if self.source != "log":
            if self.pattern is not None:
                raise ValueError("pattern goes with source 'log' only")
            return self
        try:
            groups = re.compile(self.pattern or "").groupindex
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        if "done" not in groups:
            raise ValueError("pattern needs a group named 'done': (?P<done>[0-9]+)")
        return self


class Processes(StrEnum):
    """How many processes the command of a job is started as."""

    PER_GPU = "per_gpu"  #: One for each GPU of the gang, each with its own `RANK` and `LOCAL_RANK`
    PER_NODE = "per_node"  #: One on each node of the gang, as launchers such as `torchrun` expect


class ServiceTerms(Message):
    """Where a service instance may run. It is placed before all training jobs and listens on `$WATTSHIFT_PORT`."""

    zone: Name | None = maybe("Only on nodes in this grid zone.")
    node_labels: dict[LabelKey, LabelValue] = said(
        "Only on nodes that have all of these labels.", default_factory=dict[LabelKey, LabelValue], max_length=64
    )
    fleet: Name | None = maybe("Only on the GPUs, or slices of them, that are reserved for this fleet.")


class JobSpec(Message):
    """A job as it is submitted."""

    name: Name
    command: list[Argument] = many("Program and arguments.", max_length=1_000)
    image: Text | None = maybe("Container image. The command, if there is one, runs in it.", max_length=500)
    environment: dict[EnvironmentName, Argument] = Field(
        default_factory=dict[EnvironmentName, Argument], max_length=500
    )
    source: Source | None = maybe("The job's files, where nodes share no folder with the submitter.")
    working_dir: Text | None = maybe(
        "An absolute path; with a `source`, a path in it, by default its top folder.", max_length=4_096
    )
    checkpoint_dir: AbsolutePath | None = maybe(
        "Kept between restarts. By default, each job has a folder of its own.", max_length=4_096
    )
    gpus: GpuRequest = GpuRequest()
    work: Work | None = None
    progress: Progress = Progress()
    processes: Processes | None = maybe(
        "Whether the command is started once for each GPU of the gang (`per_gpu`) or once on each of its "
        "nodes (`per_node`). By default once per node if the command is a known launcher, such as `torchrun`, "
        "`accelerate`, `deepspeed` or `mpirun`, or if the job has no command; else once per GPU. An accepted job whose "
        "gang may be wider than one GPU shows what was chosen; with one GPU there is one process either way."
    )
    family: Literal["vision", "language", "speech", "recommendation"] | None = maybe(
        "Kind of model that the job trains. It serves as a prior for scaling until measurements exist."
    )
    global_batch: Int | None = maybe(
        "Samples per step of the whole gang, the same at every size. A reported `local_batch` overrides "
        "it. With `batch`, the one that the code's learning rate is for; by default `batch.min`.",
        ge=1,
        le=10**9,
    )
    batch: BatchRange | None = maybe(
        "Permits policies that tune batches to choose the gang's total batch, samples per step, within "
        "this range. The training code reads it from `$WATTSHIFT_BATCH_SIZE` whenever it starts. `work` then counts "
        "samples, tokens or epochs."
    )
    layout: ParallelLayout | None = None
    deadline: Instant | None = None
    flexibility_s: Real | None = maybe(
        "How long the job may be delayed; null leaves that to the policy.", ge=0, le=365 * 86_400
    )
    priority: Int = said("Jobs with a higher priority go first, in policies that use it.", default=0, ge=-100, le=100)
    preemptible: Flag = True
    flex: Flex | None = maybe(
        "How much slower orders of the grid may make the job, percent; 0 spares it as long as anything "
        "else can meet an order. Null: as its tenant's `flex` says, else 25."
    )
    may_share_gpu: Flag = said(
        "Whether the job may share its GPU with another job that may, under policies that pack jobs "
        "(`gandiva`, of wattshift-lab). It has one GPU then, may be preempted, and needs at most `gpus.memory_gib` of "
        "its memory; both fit together. Jobs that share a GPU slow each other down, and one can take memory from the "
        "other.",
        default=False,
    )
    grace_s: Real = said("Time between SIGTERM and SIGKILL.", default=120, ge=0, le=3_600)
    time_limit_s: Real | None = maybe(
        "How long one run of the job may take: then SIGTERM, `grace_s`, SIGKILL. The job has failed with "
        "the reason `time_limit`, and is not restarted. A run that is preempted and continues later starts anew.",
        ge=LEAST,
        le=365 * 86_400,
    )
    max_restarts: Int = said("How often a failed job is restarted; preemptions do not count.", default=0, ge=0, le=100)
    restart_after_node_loss: Flag = said(
        "Whether the job is queued again when a node that it runs on is lost; otherwise it has failed with "
        "the reason `node_lost`.",
        default=True,
    )
    project: Name = "default"
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict[LabelKey, LabelValue], max_length=64)
    hold: Flag = said("Accept the job, but start it only after a release.", default=False)
    secrets: list[SecretUse] | None = maybe(
        "Secrets of the tenant that the job gets, as variables or as files.", max_length=MAX_SECRETS_OF_A_JOB
    )
    array: ArrayText | None = maybe(
        "Makes the submission an array: one job, a task, for each index, as `0-99`, `1,3,5-9:2` or, with "
        "at most 8 at once, `0-99%8`. A task has the array's spec, and its index in `$WATTSHIFT_ARRAY_INDEX`."
    )
    after: After | None = maybe("Jobs that must have ended before it starts, and how.")
    notify: list[Literal["started", "ended", "failed"]] | None = maybe(
        "Have these messages about the job sent also to webhooks of its tenant and project that take "
        "only the other of `job.started` and `job.ended`. `failed` is an end in which the job has failed.",
        max_length=3,
    )
    service: ServiceTerms | None = maybe("Set only for instances of pools, which are service instances.")
    cells: list[Name] | None = maybe(
        "Cells that may run the job in place of the installation that it is submitted to, by name, or `any`. It runs "
        "where it emits least and ends in time. Its command and image must be at home there.",
        max_length=100,
    )
    may_move: Flag = said(
        "Whether the job may be stopped, with its grace period, and go on in another cell that has become cleaner: its "
        "`checkpoint_dir` is one folder, the same files, here and in all of its `cells`. It reports its progress.",
        default=False,
    )

    @property
    def stays_because(self) -> str | None:
        """What keeps a job that names `cells` in this installation, as the end of a sentence; None: nothing does."""
        kept = (
            (self.gpus.zone is not None, "it is bound to a grid zone, as its data are there"),
            (bool(self.secrets), "its secrets stay in this installation"),
            (self.source is not None, "its files are in this installation"),
            (self.array is not None, "it is an array"),
            (self.after is not None, "it waits for jobs of this installation"),
            (self.service is not None, "it is an instance of a pool"),
        )
        return next((words for is_so, words in kept if is_so), None)

    @property
    def base_batch(self) -> int | None:
        """The total batch that the code's learning rate is for; None where policies may not choose another."""
        return None if self.batch is None else self.global_batch or self.batch.min

    @property
    def tasks(self) -> ArrayTasks | None:
        """The tasks of the array; None for a single job."""
        return None if self.array is None else read_array(self.array)

    def stop_at(self, running_at: datetime | None, asked_at: datetime | None) -> datetime | None:
        """Return when a gang of the job will be killed, as its nodes compute it for ``WATTSHIFT_STOP_AT``.

        Args:
            asked_at: When it was asked to stop; None if it was not.

        Returns: The end of the grace period after its time limit or after it was asked to stop, whichever is earlier;
        None if there is neither. The nodes' own times are later by what the command took.
        """
        limit_at = None
        if running_at is not None and self.time_limit_s is not None:
            limit_at = running_at + timedelta(seconds=self.time_limit_s)
        ends = [at + timedelta(seconds=self.grace_s) for at in (limit_at, asked_at) if at is not None]
        return min(ends, default=None)

    def stored(self) -> str:
        """Return the spec as JSON to store: with every default written out, and without fields that are null.

        A stored job therefore keeps the defaults it was accepted with. Only fields that a later release adds take their
        default when the job is read. A gang that may be wider than one GPU is stored with the choice of `processes`
        made: a stored job without it is one process on each node.
        """
        spec = self
        if self.processes is None and self.gpus.largest > 1:
            alone = self.service is not None or not self.command or is_launcher(self.command)
            spec = self.model_copy(update={"processes": Processes.PER_NODE if alone else Processes.PER_GPU})
        return spec.model_dump_json(exclude_none=True)

    @field_validator("working_dir")
    @classmethod
    def _in_its_source(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("source") is None:
            return value if value is None else absolute(value)
        if value is not None and (value.startswith("/") or ".." in value.split("/")):
            raise ValueError("must be a path in the source, without '..'")
        return value

    @model_validator(mode="after")
    def _has_something_to_run(self) -> Self:
        if not self.command and not self.image:
            raise ValueError("needs a command or a container image")
        if self.command and not self.command[0]:
            raise ValueError("the first argument names the program and cannot be empty")
        if self.service is not None and (self.array is not None or self.after is not None):
            raise ValueError("a service instance has no array and depends on no job")
        tasks = self.tasks
        if tasks is not None and len(self.environment) > 500 - ARRAY_VARIABLES:
            raise ValueError(f"the tasks of an array have at most {500 - ARRAY_VARIABLES} variables")
        if tasks is not None and len(task_name(self.name, tasks.indices[-1])) > 63:
            raise ValueError("name is too long for an array: with the index of a task it has more than 63 characters")
        return self

    @model_validator(mode="after")
    def _secrets_have_places_of_their_own(self) -> Self:
        taken = {f"variable {name}" for name in self.environment}
        for use in self.secrets or ():
            place = f"variable {use.env}" if use.env else f"file {use.file}"
            if place in taken:
                raise ValueError(f"secrets: the {place} is given twice")
            taken.add(place)
        return self

    @model_validator(mode="after")
    def _batches_can_be_tuned(self) -> Self:
        if self.batch is None:
            return self
        if self.service is not None:
            raise ValueError("a service instance has no batch")
        if self.batch.max < self.gpus.largest:
            raise ValueError(f"batch.max has no sample for each of the {self.gpus.largest} GPUs of the largest gang")
        if self.global_batch is not None and not self.batch.min <= self.global_batch <= self.batch.max:
            raise ValueError("global_batch must lie between batch.min and batch.max")
        if self.work is not None and self.work.unit == "steps":
            raise ValueError("with batch, work must count samples, tokens or epochs: what a step does changes")
        return self

    @model_validator(mode="after")
    def _can_move(self) -> Self:
        if self.may_move and not (self.cells and self.checkpoint_dir and self.preemptible):
            raise ValueError("may_move needs cells and a checkpoint_dir, and a job that is preemptible")
        return self

    @model_validator(mode="after")
    def _may_share(self) -> Self:
        if not self.may_share_gpu:
            return self
        if self.service is not None or self.gpus.slice is not None or self.gpus.min != 1:
            raise ValueError("may_share_gpu is for jobs that can run on one whole GPU, and for no service instance")
        if not self.preemptible:
            raise ValueError("a job that may share its GPU may be preempted: leave preemptible at true")
        if self.gpus.memory_gib is None:
            raise ValueError("a job that may share its GPU says how much of its memory it needs, gpus.memory_gib")
        return self

    @model_validator(mode="after")
    def _services_have_one_size(self) -> Self:
        if self.service is not None and self.service.fleet is not None and self.gpus.slice is None:
            raise ValueError("an instance of a fleet runs on a slice: gpus.slice is missing")
        if self.service is not None and self.gpus.largest != self.gpus.min:
            raise ValueError("a service instance has a fixed size: gpus.max must equal gpus.min")
        if self.service is not None and self.processes is Processes.PER_GPU:
            raise ValueError("a service instance is one process: processes must be per_node")
        return self


def task_name(array_name: str, index: int) -> str:
    return f"{array_name}.{index}"


class JobBatch(Message):
    """Several jobs, which are accepted all together or not at all."""

    jobs: list[JobSpec] = Field(min_length=1, max_length=MAX_BATCH_JOBS)


class JobProgress(Message):
    """A job's progress."""

    done: float
    total: float | None = None
    unit: str | None = None
    updated_at: Instant
    saved_at: Instant | None = maybe("When the job last said that it has saved its work; null if it does not say.")
    save_every_s: float | None = maybe("How long it was until then from the save before, or its start.")
    save_s: float | None = maybe("How long saving took, by its own word.")


class Share(Message):
    """A gang's devices on one node."""

    node_id: str
    devices: list[int]


class JobFootprint(Message):
    """What a job has used and emitted so far.

    Emissions are location-based: energy times the intensity at the time of use, times PUE.
    """

    energy_j: float = 0
    gpu_energy_j: float = 0
    carbon_gco2: float = 0
    gpu_s: float = 0
    estimated_energy_j: float = said("The part of `energy_j` that was modelled, not measured.", default=0)


class Job(Message):
    """A job and its current state."""

    id: str
    number: int | None = maybe(
        "What people type as its id: 1, 2, ... in its tenant; a task has that of its array. Null if a "
        "release without numbers accepted it."
    )
    tenant_id: str
    user: str | None = maybe("Name of the user whose key submitted it; null if the key belonged to no user.")
    name: str
    project: str
    state: JobState
    reason: Reason | str | None = maybe("Stable code of why the job waits or how it ended.")
    detail: str | None = maybe("The reason in words.")
    spec: JobSpec
    submitted_at: Instant
    started_at: Instant | None = None
    ended_at: Instant | None = None
    expected_start_at: Instant | None = maybe(
        "When the policy expects to start a waiting job, by what is known now and provided that GPUs are "
        "free by then; null if unknown."
    )
    generation: int = said("How many times the job has been given GPUs.")
    gpus: int = said("GPUs that the job holds now.")
    placement: list[Share] = Field(default_factory=list[Share])
    power_limit_w: float | None = maybe("Power limit set on each of its GPUs; null for the default.")
    clock_mhz: int | None = maybe("Clock that its GPUs are locked to; null for the default.")
    batch_size: int | None = maybe(
        "Total batch, samples per step, that its gang was started with; null while it holds no GPUs, and "
        "without `batch` in its spec."
    )
    stop_at: Instant | None = maybe(
        "By when its processes will be killed, as in the job's own `WATTSHIFT_STOP_AT`: once it was asked "
        "to stop, the end of its grace period; under a time limit, the end of that and of the grace period after it; "
        "null while neither is known, and on other engines."
    )
    preemptions: int
    restarts: int
    node_losses: int = said(
        "How often it lost a GPU, or a node while most others stayed up, each within a day of "
        "the one before; after three times it is held, and a release begins the count anew.",
        default=0,
    )
    exit_code: int | None = None
    cell: str | None = maybe("The cell that has it, or had it when it ended; null: none, this installation has it.")
    checkpoint_nodes: list[str] = many(
        "The only nodes that have the checkpoint of a job that waits: it starts on these, or waits for "
        "them; none if it may start anywhere."
    )
    progress: JobProgress | None = None
    footprint: JobFootprint = JobFootprint()
    warnings: list[str] = many("Budgets of its project that are exceeded and only warn.")
    array_id: str | None = maybe("The array that it is a task of.")
    array_index: int | None = maybe("Its index in the array.")


class JobList(Page[Job]):
    """One page of jobs, newest first."""


class JobCounts(Message):
    """How many jobs have not ended, by state, and why waiting ones wait."""

    queued: int = 0
    held: int = 0
    starting: int = 0
    running: int = 0
    preempting: int = 0
    gpus: int = said("GPUs that they hold now.", default=0)
    waiting: dict[str, int] = said(
        "Why queued and held jobs wait: how many, by reason; `new` before the first round.",
        default_factory=dict[str, int],
    )


class JobArray(Message):
    """An array: jobs of one spec, its tasks, that are submitted, and can be cancelled and held, as one."""

    id: str
    number: int | None = maybe("As for a job; its tasks are `NUMBER.INDEX`.")
    tenant_id: str
    user: str | None = maybe("Name of the user whose key submitted it; null if the key belonged to no user.")
    name: str = said("Its tasks are named `NAME.INDEX`.")
    project: str
    state: JobState = said(
        "Of its tasks together: `running`, `starting`, `preempting`, `queued` or `held` if any is, in this "
        "order; else `succeeded` if all did, `failed` if any did, or `cancelled`."
    )
    spec: JobSpec = said("As it was submitted. Dependencies are named by ids.")
    count: int = said("How many tasks it has.")
    first: int = said("The lowest index.")
    last: int = said("The highest index.")
    max_running: int | None = maybe("The most tasks that hold GPUs at once; null: no limit.")
    tasks: TaskCounts
    waiting: dict[str, int] = said(
        "Why queued and held tasks wait: how many, by reason.", default_factory=dict[str, int]
    )
    next_task: str | None = maybe("The queued or, if there is none, the held task of the lowest index.")
    gpus: int = said("GPUs that its tasks hold now.")
    submitted_at: Instant
    started_at: Instant | None = maybe("When its first task started.")
    ended_at: Instant | None = maybe("When its last task ended; null before that.")
    footprint: JobFootprint = said("Of all its tasks.", default=JobFootprint())


class JobArrayList(Page[JobArray]):
    """One page of arrays, newest first."""


class SubmittedJob(Message):
    """The answer to a submission. The job, or the array with all its tasks, is on disk by then."""

    id: str
    number: int | None = maybe("What people type as its id; see `Job`.")
    name: str
    state: JobState
    submitted_at: Instant
    count: int | None = maybe("Tasks of the array; null for a single job.")


class SubmittedBatch(Message):
    """The answer to a batch, with the jobs in the order of the request."""

    jobs: list[SubmittedJob]


class LogStream(StrEnum):
    """Standard output, standard error, or both together in the order in which they were written."""

    BOTH = "both"
    STDOUT = "stdout"
    STDERR = "stderr"


class JobEvent(Message):
    """Something that happened to a job."""

    id: str = said("Send it back as `Last-Event-ID` to continue after this event.")
    job_id: str
    at: Instant
    type: str = said("`job.submitted`, `job.starting`, `job.running`, `job.preempting`, `job.queued`, ...")
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class SubmissionEntry(Message):
    """One submission on its way from the gateway to admission; many travel in one request."""

    tenant_id: str
    key_id: str
    idempotency_key: str | None
    batch: bool
    body: str = said("The request body as received, not yet validated.")
    service: bool = said("Whether it may ask for a service instance; the gateway never allows that.", default=False)
    user_id: str | None = maybe("Whose key submits it; null for a key of no user.")
    project: str | None = maybe("The only project that the key may submit to; null: any.")
    traceparent: str | None = maybe("The trace, as in W3C Trace Context, `;` and the id of the user's request.")


class SubmissionRequest(Message):
    """Submissions that the gateway gathered into one request."""

    entries: list[SubmissionEntry]


class SubmissionAnswer(Message):
    """The answer to one submission."""

    status: int
    body: str
    replayed: bool = False
    location: str | None = maybe("Path of the new job; null for a batch.")


class SubmissionAnswers(Message):
    """The answers to a `SubmissionRequest`, in the order of its entries."""

    answers: list[SubmissionAnswer]
