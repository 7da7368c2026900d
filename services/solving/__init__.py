"""Optimization problems as the core solves them: who has a message and wants an answer to it converts it here."""
