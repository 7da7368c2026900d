"""Asyncio code under a simulated loop, in which every choice comes from a seed: README.md beside this file."""
