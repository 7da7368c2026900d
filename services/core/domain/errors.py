"""The tree of errors.

WattshiftError
├── DomainError          a value outside what a function accepts
├── PolicyConfigError    an operator's policy parameters are not valid
├── PlanError            a plan that breaks an invariant of the cluster (a bug in a policy, or a stale plan)
└── TransitionError      a job cannot go from its state to the requested one

An expected outcome (a gang that does not fit, an infeasible solve) is a value, never an exception. The processes'
own failures (a missing job, a bad key) live in ``services.kit.problems``, which also turns these into HTTP.
"""


class WattshiftError(Exception):
    """Root of all errors that the project raises on purpose."""

    code = "internal"


class DomainError(WattshiftError, ValueError):
    """A value outside what a function accepts."""

    code = "invalid_value"


class PolicyConfigError(WattshiftError, ValueError):
    """A policy's parameters are not valid; ``pointer`` names the offending one."""

    code = "invalid_policy_parameters"

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer


class PlanError(WattshiftError):
    """A plan breaks an invariant of the cluster; it must not be applied."""

    code = "invalid_plan"


class TransitionError(WattshiftError):
    """A job cannot go from its state to the requested one."""

    code = "invalid_transition"
