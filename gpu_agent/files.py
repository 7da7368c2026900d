"""Small files that survive, as the rest of the product writes them."""

from services.kit.files import replace

__all__ = ["replace"]
