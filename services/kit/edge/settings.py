"""Settings that public processes share; each has them under its own prefix."""

from pydantic import Field

from services.contracts.schema import said
from services.kit.settings import SharedSettings


class EdgeSettings(SharedSettings):
    """How long answers about keys are used, and how much of the request bodies is held in memory."""

    key_max_age_s: float = said(
        "How long an answer about a key is used; a revoked key works that much longer.", default=3, gt=0
    )
    key_grace_s: float = said(
        "How long a known key is still accepted while admission does not answer.", default=300, ge=0
    )
    key_cache_size: int = Field(default=10_000, ge=1)
    max_body_bytes: int = said("Of a request that is not a batch.", default=1024 * 1024, ge=1)
    max_batch_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    max_buffered_bytes: int = said(
        "Bodies held in memory at once; beyond it, requests get 503.", default=256 * 1024 * 1024, ge=1
    )
