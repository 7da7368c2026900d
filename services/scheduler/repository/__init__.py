"""All SQL of the scheduler, by subject; every query returns typed rows."""
