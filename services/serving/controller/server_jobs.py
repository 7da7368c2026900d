"""The jobs that instances run as: submitted to admission and cancelled there."""

from collections.abc import Sequence

import orjson

from services.contracts.identity import Identity, Role
from services.contracts.jobs import (
    SubmissionAnswer,
    SubmissionAnswers,
    SubmissionEntry,
    SubmissionRequest,
    SubmittedJob,
)
from services.contracts.problems import Problem
from services.contracts.serving import InstanceState
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.serving.controller.advance import Seen
from services.serving.instances import APP_PREFIX, Instance, InstanceReason

log = Log(__name__)

KEY_ID = "pools"
ENTRIES_A_REQUEST = 100
LONGEST_NAME = 63


def job_document(instance: Instance) -> str:
    """Return an instance's job, made from its row alone, so that its submission can be repeated at any time."""
    mode, place, fleet = instance.terms.mode, instance.terms.place, instance.terms.fleet
    owner = instance.pool.removeprefix(APP_PREFIX)
    kind = "pool" if fleet is None else "app"
    gpus = {"min": mode.gpus, "model": mode.gpu_model, **({"slice": instance.terms.slice} if fleet else {})}
    document = {
        "name": f"{owner}-{mode.name}"[:LONGEST_NAME],
        "command": mode.command,
        "image": mode.image,
        "environment": {**mode.environment, f"WATTSHIFT_{kind.upper()}": owner, "WATTSHIFT_INSTANCE": instance.id},
        "working_dir": mode.working_dir,
        "gpus": gpus,
        "progress": {"source": "none"},
        "preemptible": False,
        "grace_s": instance.terms.probes.grace_s,
        "max_restarts": 0,
        "project": owner,
        "labels": {kind: owner, "place": place.name, "mode": mode.name},
        "service": {"zone": place.zone, "node_labels": place.node_labels} | ({"fleet": fleet} if fleet else {}),
    }
    return orjson.dumps(document).decode()


class ServerJobs:
    """Calls admission; a request that fails is repeated at the next pass."""

    def __init__(self, admission: ServiceClient) -> None:
        self._admission = admission

    async def submit(self, instances: Sequence[Instance]) -> dict[str, Seen]:
        """Submit the jobs of wanted instances and return the outcomes; the instance's id is the idempotency key."""
        seen: dict[str, Seen] = {}
        for start in range(0, len(instances), ENTRIES_A_REQUEST):
            some = instances[start : start + ENTRIES_A_REQUEST]
            entries = [
                SubmissionEntry(
                    tenant_id=each.tenant_id,
                    key_id=KEY_ID,
                    idempotency_key=each.id,
                    batch=False,
                    body=job_document(each),
                    service=True,
                )
                for each in some
            ]
            try:
                answers = await self._admission.call(
                    *("POST", "/internal/submissions", SubmissionAnswers), body=SubmissionRequest(entries=entries)
                )
            except ProblemError as error:
                log.warning("instances.not_submitted", error=str(error))
                reason = InstanceReason.ADMISSION_UNAVAILABLE
                away = Seen(InstanceState.WANTED, refusal=(reason.value, reason.sentence))
                return seen | {each.id: away for each in instances if each.id not in seen}
            seen |= {each.id: _seen(answer) for each, answer in zip(some, answers.answers, strict=True)}
        return seen

    async def cancel(self, instance: Instance) -> None:
        """Cancel the job of an instance; it may have ended already."""
        caller = Identity(tenant_id=instance.tenant_id, role=Role.USER, key_id=KEY_ID)
        try:
            await self._admission.request("POST", f"/v1/jobs/{instance.job_id}/cancel", identity=caller)
        except ProblemError as error:
            if error.status != 409:
                log.warning("instance.not_cancelled", id=instance.id, job=instance.job_id, error=str(error))


def _seen(answer: SubmissionAnswer) -> Seen:
    if answer.status == 201:
        return Seen(InstanceState.WANTED, job_id=SubmittedJob.model_validate_json(answer.body).id)
    problem = Problem.model_validate_json(answer.body)
    if answer.status == 429 or answer.status >= 500:  # it may pass
        return Seen(InstanceState.WANTED, refusal=(problem.code, problem.detail))
    return Seen(InstanceState.WANTED, refusal=(InstanceReason.REFUSED.value, problem.detail), is_final=True)
