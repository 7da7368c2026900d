"""What Slurm's reasons why a job waits (``state_reason``) mean to plans: those of 22.05 to 25.11, and unknown ones.

A job that waits for anything else than GPUs and its turn takes no GPUs in plans.
"""

import re

TURN = frozenset({"", "None", "Resources", "Priority", "BeginTime", "SchedDefer", "Cleaning"})
"""It starts as soon as there are GPUs and it is its turn. Begin times are read of the job itself."""
_LIMITS = r"Max\w+RunMinsPer(?:User|Account)|Max\w+PerAccount"
MEANINGS = {
    rf"QOS\w+|InvalidQOS|{_LIMITS}": "its QOS",
    r"Assoc\w+|AccountingPolicy|AccountNotAllowed|InvalidAccount": "its account or user",
    r"Partition\w+|MaxMemPerLimit": "its partition",
    r"Licenses|BurstBuffer\w+|MpiPortsBusy|NvidiaImexChannels|MaxPoweredUpNodes|Power\w+": "what is used up",
    r"ReqNodeNotAvail|NodeDown|FrontEndDown|(?:Bad)?Constraints|Reservation\w*|Block\w+": "nodes that it cannot have",
    r"Dependency\w*|JobArrayTaskLimit|FedJobLock": "other jobs",
    r"JobHeld\w+|JobHoldMaxRequeue": "its release",
    r"JobLaunchFailure|NonZeroExitCode|OutOfMemory|RaisedSignal|SystemFailure": "its last run's end",
    r"TimeLimit|InactiveLimit|DeadLine|Prolog": "its last run's end",
}
"""What jobs wait for, by the reasons that say so."""


def waits_for(reason: str) -> str:
    """Return what else than GPUs and its turn a job waits for, in Slurm's word and ours; empty if nothing."""
    if reason in TURN:
        return ""
    return next((f"{reason}: {what}" for said, what in MEANINGS.items() if re.fullmatch(said, reason)), reason)
