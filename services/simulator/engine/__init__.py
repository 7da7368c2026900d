"""The event-driven engine: a simulated cluster that carries out the plans of the live round.

``simulation`` holds the clock, the events and the rounds; ``live`` the jobs, ``cluster`` the nodes, ``grid`` the
carbon, ``behaviour`` what jobs do at each size; ``recorder`` and ``result`` the outcome of a run; ``options`` the
options of the engine; ``beginning`` a cluster at work from which a run goes on. It imports only the core and
``simulator.workload``.
"""

from services.simulator.engine.beginning import Beginning
from services.simulator.engine.options import EngineOptions
from services.simulator.engine.result import JobColumns, Series, SimulationResult
from services.simulator.engine.simulation import Simulation, simulate

__all__ = ["Beginning", "EngineOptions", "JobColumns", "Series", "Simulation", "SimulationResult", "simulate"]
