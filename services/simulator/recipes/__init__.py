"""Workload recipes: how the jobs of a trace behave, where the trace states less than a simulation needs.

``measured.py`` holds the measured models, ``green.py`` and ``stated.py`` the recipes; each documents its mapping.
"""

from services.simulator.recipes.green import green, green_assuming, green_users
from services.simulator.recipes.measured import Assumed
from services.simulator.recipes.powerflow import (
    powerflow,
    powerflow_fitted,
    powerflow_strong,
    powerflow_strong_fitted,
)
from services.simulator.recipes.recipe import Recipe
from services.simulator.recipes.recurrent import recurrent
from services.simulator.recipes.stated import measured, plain, sia

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("green", "measured models by duration; one GPU asked for where the trace does not say", green),
        Recipe("green-users", "the same, with gangs as users of Philly asked for", green_users),
        green_assuming("green-fast-links", Assumed(fast_links=True)),
        green_assuming("green-waiting-5", Assumed(waiting_fraction=0.05)),
        green_assuming("green-waiting-30", Assumed(waiting_fraction=0.3)),
        Recipe("powerflow", "models and batches of PowerFlow's Table 1, gangs as users of Philly asked for", powerflow),
        Recipe("powerflow-fitted", "the same, with policies seeing fitted models instead", powerflow_fitted),
        Recipe("powerflow-strong", "as powerflow, with the batch of a job split over its GPUs", powerflow_strong),
        Recipe("powerflow-strong-fitted", "the same, with policies seeing fitted models", powerflow_strong_fitted),
        Recipe("a-srpt", "recurring jobs of nine models in parallel layouts, 70 % on one GPU", recurrent()),
        *(
            Recipe(f"a-srpt-{share}", f"the same, {share} % on one GPU", recurrent(share / 100))
            for share in (80, 60, 40, 20, 0)
        ),
        Recipe("plain", "rigid gangs as in the trace, the same power for all", plain),
        Recipe("measured", "rigid gangs, each job with its own measured power", measured),
        Recipe("sia", "jobs that name the application they train", sia),
    )
}
DEFAULT_RECIPE = {
    "philly": "green",
    "openb": "green",
    "pai": "green",
    "pai-hours": "green",
    "pai-seconds": "green",
    "sia": "sia",
    "tiresias": "plain",
    "swf": "plain",
    "sacct": "plain",
    "wattshift": "measured",
}
"""By format of the trace."""

__all__ = ["DEFAULT_RECIPE", "RECIPES", "Recipe"]
