"""Lists and pairs in environment variables: ``a,b`` and ``a=x,b=y``."""

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from services.core.domain.carbon import Signal


def _words(value: Any) -> Any:
    """Split a comma-separated list; an empty string gives no words."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """Split ``key=value,key=value``."""
    if not isinstance(value, str):
        return value
    pairs: dict[str, str] = {}
    for word in _words(value):
        key, separator, meaning = (part.strip() for part in word.partition("="))
        if not separator or not key or not meaning:
            raise ValueError(f"expected name=value, separated by commas; got {word!r}")
        if key in pairs:
            raise ValueError(f"{key} is named twice")
        pairs[key] = meaning
    return pairs


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
Signals = Annotated[tuple[Signal, ...], NoDecode, BeforeValidator(_words)]
Numbers = Annotated[dict[str, int], NoDecode, BeforeValidator(_pairs)]
