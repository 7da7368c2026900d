"""The queues: for solves and for trainings, served by the same workers, and for the solves that plans of pools await.

The last has its own workers, so that a solve that takes minutes does not make a plan late.
"""

from services.contracts.solver import MAX_SOLVER_TIME_S
from services.kit.celery import TaskLimits

QUEUE = "optimizer"
TASK = "optimizer.solve"
PLAN_QUEUE = "plan-solves"
TRAINING_QUEUE = "lengths"
TRAINING_TASK = "lengths.train"
TRAINING_LIMITS = TaskLimits(soft_s=900, hard_s=960)
# A solve may run its solver twice (an infeasible problem's shortfall is a solve of its own).
LIMITS = TaskLimits(soft_s=2 * MAX_SOLVER_TIME_S + 60, hard_s=2 * MAX_SOLVER_TIME_S + 120)
