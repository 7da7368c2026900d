"""All SQL of the optimizer: on solves, and on the trainings of job lengths."""
