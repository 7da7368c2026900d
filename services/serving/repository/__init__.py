"""Queries on pools, their plans, instances and traffic."""
