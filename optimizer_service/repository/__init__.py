"""All SQL of the optimizer: solves, and trainings of the job length model."""
