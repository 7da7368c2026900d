"""GREEN (NSDI'25): training jobs by carbon, with elastic gangs and temporal shifting.

A job enters the upper queue, where it gains one step of GPUs per active round as long as its energy efficiency holds up
(``efficiency``). Then it moves to the lower queue, where the jobs that have emitted least run first, and high-power
jobs are moved to the grid's greener hours (``carbon``). The upper queue runs ahead of the lower one on a share of the
cluster, theta; its jobs beyond that are ranked with those of the lower queue. ``mlfq`` combines both into one ranking;
``config`` has the parameters.

Paper symbols: EFFICIENCY and DEGRADATION are ``JobTable.efficiency_*`` and ``degradation``; FOOTPRINT is
``JobTable.carbon_gco2``; P* is ``rescaled_power``; gamma, theta and mu keep their names.
"""
