"""The job traces, formats and recipes available by name: the product's own, and those of installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from services.kit.plugins import load_plugins
from services.simulator import recipes
from services.simulator.bundles import YEAR_DAYS, Bundle
from services.simulator.engine.options import Foreseeing
from services.simulator.readers import formats
from services.simulator.readers.formats import JobFormat
from services.simulator.recipes import Recipe

GROUP = "wattshift.simulations"
IN_LAB = frozenset(
    {
        *("a-srpt", "a-srpt-0", "a-srpt-20", "a-srpt-40", "a-srpt-60", "a-srpt-80", "powerflow-day", "powerflow"),
        *("powerflow-fitted", "powerflow-strong", "powerflow-strong-fitted", "green-users", "green-fast-links"),
        *("green-waiting-5", "green-waiting-30", "sia", "openb", "pai", "pai-hours", "pai-seconds", "philly"),
        *("swf", "tiresias"),
    }
)
"""Names that the package wattshift-lab adds: they only serve the message where it is missing."""


@dataclass(frozen=True)
class Catalogue:
    """Simulation inputs by name."""

    jobs: Mapping[str, Bundle]  #: Bundled traces
    formats: tuple[JobFormat, ...]  #: Formats of job files
    recipes: tuple[Recipe, ...]  #: How jobs behave
    recipe_of: Mapping[str, str]  #: The default recipe of each format
    predictors: Mapping[str, Callable[[int], Foreseeing]] = field(
        default_factory=dict[str, Callable[[int], Foreseeing]]
    )
    """Predictors of lengths that learn from jobs that have ended, from a seed."""


@cache
def catalogue() -> Catalogue:
    """Return everything available in this process; ``PluginError`` if an installed package adds what is unusable."""
    found = Catalogue(
        jobs={"green-year": Bundle("green_year.csv", YEAR_DAYS), "green-day": Bundle("green_day.csv", 1)},
        formats=formats.OURS,
        recipes=recipes.OURS,
        recipe_of={"sacct": "plain", "wattshift": "measured"},
    )
    for plugin in load_plugins(GROUP, Catalogue):
        found = Catalogue(
            {**found.jobs, **plugin.value.jobs},
            (*plugin.value.formats, *found.formats),
            (*found.recipes, *plugin.value.recipes),
            {**found.recipe_of, **plugin.value.recipe_of},
            {**found.predictors, **plugin.value.predictors},
        )
    return found


def unknown(what: str, name: str, names: str) -> str:
    """Return a message that says why this name is unknown, and what to do."""
    if name in IN_LAB:
        return (
            f"the {what} {name!r} is in the package wattshift-lab, which is not installed here; in a checkout of this "
            "release: pip install ./lab"
        )
    return f"unknown {what} {name!r}; known: {names}"
