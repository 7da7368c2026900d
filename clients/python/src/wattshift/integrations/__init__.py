"""Callbacks for training libraries, each of which is an extra: ``torch``, ``transformers``, ``lightning``.

Each reports progress to Wattshift and, when the job is being stopped, saves a checkpoint and ends training.
Outside a job they report nothing and never stop training by themselves.
"""
