"""Traces and tables that come with the lab. ``NOTICE`` names their sources.

========================== ================================================================================== =========
file                       what                                                                               licence
========================== ================================================================================== =========
``powerflow_day.csv``      1,901 arrivals of one day                                                          MIT
``a_srpt_day.csv.gz``      12,637 arrivals of one day, repeated for twelve days                               MIT
``powerflow_fits.json``    what fits to the measured speeds and powers predict of a V100                      see NOTICE
``azure_2023_conv.csv.gz`` 19,366 LLM requests of an hour, with their numbers of tokens                       CC BY 4.0
``freesh_pools.json``      GPUs, modes, partitions and profiles of FREESH's authors, as a pool                MIT
``freesh_rates.csv``       a day of their three places' marginal intensities, gCO2/kWh                        MIT
``ciso_march.csv`` ...     Clover's authors' three traces of 49 hours, gCO2/kWh                               MIT
``speeds.csv``             measured training speed by model, batch, gang and placement                        see NOTICE
``powers.csv``             measured training power by model, batch and power limit                            see NOTICE
``slice_speeds.csv``       measured training speed on MIG slices by model and batch                           MIT
``sia_work.csv``           samples needed to train a model, by batch size                                     see NOTICE
``noise.csv``              gradient noise scale by model, tenth of the training and batch size                see NOTICE
``inference_slices.csv``   one EfficientNet instance on fractions of an H200: latency and power               ours
``inference_shared.csv``   the same with several instances at once                                            ours
``accuracy_*.json``        accuracy of the variants that Clover's authors serve, in per cent                  MIT
``one_gpu_h200.json``      what ``lab.hardware.measure`` read on a host with one H200                         ours
========================== ================================================================================== =========

The days are samples of GAIA's sample of Alibaba's PAI trace, which ``lab/reproductions/make_traces.py`` draws by a
fixed seed; ``lab/reproductions/make_profiles.py`` makes the measured tables,
``lab/reproductions/powerflow_fits.py`` the fits. ``powerflow-day``: as many jobs as the PowerFlow
paper's day has, drawn from the whole trace with their durations and the hours of the day they came at. ``a-srpt``: as
many jobs a day as the A-SRPT paper's trace has (758,223 in two months), drawn in the same way; twelve days are the
fifth of it that the paper simulates.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any


def path_of(file: str) -> Path:
    """Return where a bundled file is."""
    return Path(str(resources.files("lab.bundles").joinpath(file)))


def json_of(file: str) -> Any:
    """Return the content of a bundled JSON file."""
    return json.loads(path_of(file).read_bytes())
