"""Small files that survive a crash, written as in the rest of the product."""

from services.kit.files import replace

__all__ = ["replace"]
