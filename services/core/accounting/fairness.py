"""How evenly tenants are served."""

from collections.abc import Iterable


def jain_index(served: Iterable[float]) -> float:
    """Return Jain's index, ``(sum x)^2 / (n * sum x^2)``: 1 if all are served equally, 1/n if one gets everything.

    NaN if there are no tenants, and 1 if none has received anything.

    Args:
        served: What each has received relative to its weight, in any unit, >= 0. Here: the GPU time of tenants that
            had jobs waiting, since a tenant that wants no more is not served badly.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness and Discrimination, DEC-TR-301, 1984.
    """
    values = [*served]
    if not values:
        return float("nan")
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0
