"""Workload recipes: how the jobs of a trace behave when the trace states less than a simulation needs.

``measured.py`` holds the measured models, ``green.py`` and ``stated.py`` the recipes; each documents its mapping.
Recipes that only reproduce papers are in ``lab/recipes``.
"""

from services.simulator.recipes.green import green
from services.simulator.recipes.recipe import Recipe
from services.simulator.recipes.stated import measured, plain

OURS = (
    Recipe("green", "measured models by duration; one GPU asked for where the trace does not say", green),
    Recipe("plain", "rigid gangs as in the trace, the same power for all", plain),
    Recipe("measured", "rigid gangs, each job with its own measured power", measured),
)

__all__ = ["OURS", "Recipe"]
