"""How far orders of the grid may slow a job down."""

from typing import Literal

Flex = Literal[0, 10, 25, 50]
"""Percent: a job of class 0 is spared as long as anything else can meet an order."""
DEFAULT_FLEX: Flex = 25
