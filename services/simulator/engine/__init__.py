"""The event-driven engine: a simulated cluster that carries out the plans of the live round.

``simulation`` holds the clock, the events and the rounds; ``live`` the jobs, ``cluster`` the nodes, ``grid`` the
carbon, ``behaviour`` how jobs run at each size; ``recorder`` and ``result`` the outcome of a run; ``options`` the
engine's options; ``beginning`` a running cluster to start from. The engine imports only the core and
``simulator.workload``.
"""

from services.simulator.engine.beginning import Beginning
from services.simulator.engine.options import EngineOptions
from services.simulator.engine.result import JobColumns, Series, SimulationResult
from services.simulator.engine.simulation import Simulation, simulate

__all__ = ["Beginning", "EngineOptions", "JobColumns", "Series", "Simulation", "SimulationResult", "simulate"]
