"""What papers simulate: their traces and how the jobs of these behave, for ``wattshift simulate`` and experiments.

The product finds ``ADDED`` by the entry point ``wattshift.simulations``.
"""

from lab.foresight import PREDICTORS, learning
from lab.readers.openb import Openb
from lab.readers.pai import Pai
from lab.readers.philly import Philly
from lab.readers.sia import Sia
from lab.readers.swf import Swf
from lab.readers.tiresias import Tiresias
from lab.recipes.green import green_assuming, green_users
from lab.recipes.measured import Assumed
from lab.recipes.powerflow import powerflow, powerflow_fitted, powerflow_strong, powerflow_strong_fitted
from lab.recipes.recurrent import recurrent
from lab.recipes.sia import sia
from services.simulator.bundles import Bundle
from services.simulator.catalogue import Catalogue
from services.simulator.recipes import Recipe

PAI = (Pai("pai"), Pai("pai-hours"), Pai("pai-seconds"))

ADDED = Catalogue(
    jobs={
        "a-srpt": Bundle("a_srpt_day.csv.gz", 12, "a-srpt", "lab.bundles"),
        "powerflow-day": Bundle("powerflow_day.csv", 1, "powerflow", "lab.bundles"),
    },
    formats=(Swf(), Philly(), Openb(), *PAI, Sia(), Tiresias()),
    recipes=(
        Recipe("green-users", "`green`, with gangs as users of Philly asked for", green_users),
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
        Recipe("sia", "jobs that name the application they train", sia),
    ),
    recipe_of={
        **{reader.name: "green" for reader in (Philly(), Openb(), *PAI)},
        "sia": "sia",
        **dict.fromkeys(("swf", "tiresias"), "plain"),
    },
    predictors={name: lambda seed, of=of: learning(of(seed)) for name, of in PREDICTORS.items()},
)
