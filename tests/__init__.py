"""Tests, one folder per room; `support/` holds what several of them use."""
