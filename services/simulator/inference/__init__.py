"""Measured profiles of model variants: how fast each is on a slice, and what it draws."""
