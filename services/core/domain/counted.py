"""Numbers of things in sentences that people read."""


def counted(count: float, noun: str, plural: str = "") -> str:
    """Return a count with its noun, as in ``1 GPU`` and ``2 GPUs``."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else plural or f'{noun}s'}"
