"""Conversion of optimization problems and answers between messages and the core."""
