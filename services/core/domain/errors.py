"""The tree of broken promises.

WattshiftError
├── DomainError          a value outside what a function promises to take
├── PolicyConfigError    an operator's policy parameters that do not hold together
├── PlanError            a plan that breaks an invariant of the cluster (a bug in a policy, or a stale plan)
└── TransitionError      a job asked to go from one state to another that it cannot reach

An expected outcome (a gang that does not fit, an infeasible solve) is a value, never an exception. The processes'
own failures (a missing job, a bad key) live in ``services.kit.problems``, which also turns these into HTTP.
"""


class WattshiftError(Exception):
    """Root of every error the project raises on purpose."""

    code = "internal"


class DomainError(WattshiftError, ValueError):
    """A value outside what a function promises to take."""

    code = "invalid_value"


class PolicyConfigError(WattshiftError, ValueError):
    """A policy's parameters do not hold together; ``pointer`` names the offending one."""

    code = "invalid_policy_parameters"

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer


class PlanError(WattshiftError):
    """A plan breaks an invariant of the cluster; it must not be applied."""

    code = "invalid_plan"


class TransitionError(WattshiftError):
    """A job cannot go from the state it is in to the one asked for."""

    code = "invalid_transition"
