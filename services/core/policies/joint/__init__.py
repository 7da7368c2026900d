"""``joint``: width, order, hours, power limits and sleeping nodes decided by one cost.

Every decision minimises, over the work that a job has left,

    cost = integral of  P(g, l) / 1000 * c(t)  dt  +  w * (completion - now)        gCO2

======== ==================================================================== ==============
symbol   here                                                                 unit
======== ==================================================================== ==============
P(g, l)  draw of a gang of ``g`` GPUs at power limit ``l``, with its hosts    W
c(t)     intensity, as forecast                                               gCO2/kWh
w        what an hour of a job's completion time is worth:                    gCO2/h
         ``hour_share * P(asked) / 1000`` times the mean intensity of the day
         around now, ``P(asked)`` the draw at the size its user asked for
======== ==================================================================== ==============

With ``tonne_price`` ``c(t)`` is in money per kWh, the price of electricity with that of its carbon (``costs``).

Time that a mode takes beyond what the size and batch the user asked for would take counts ``config.LOST_TIMES`` times.
Nothing here has a scale of its own (``tests/simulator/test_asked_gangs.py``); ``hour_wh`` sets an absolute ``w``
instead.

- *Width* and *power limit*: while the job runs, its cost per unit of work is ``(P(g, l) + w / c) / speed(g, l)``
  (``modes``, ``controls``). For a limit, ``P(asked)`` is that of the gang itself at full power. In green hours
  ``w / c`` is larger, so jobs run wider and faster then.
- *Hours*: a job that has time until its deadline waits if the carbon it saves is worth the later completion
  (``hours``), bounded by the user's deadline or the slack that the operator grants; where GPUs are not scarce, its size
  in each hour is planned with them. ``c`` ahead is the forecast's middle or another quantile (``quantiles``).
- *Order*: late jobs first, then those of unknown length, then those with the fewest GPU seconds left at their smallest
  gang. No gang is wider than its smallest while anybody waits for GPUs. All take their first step before anyone takes a
  second, which goes where it saves most per GPU second. Waiting jobs make faster limits worth more: ``w`` of a limit is
  multiplied by one plus the ratio of jobs that wait for GPUs to those that hold some.
- *Batch*: if its user permits it, a gang starts with the batch of the highest goodput at its size; speeds by size
  are then those with the tuned batch (``policies.batches``).
- *Seats*: a gang whose stages and bytes are known sits where its iterations are shortest, and waits a while for that
  rather than crawl (``placing``).
- *Sleep*: nodes that nobody uses are powered down (``placing``).

How long a job still needs is the prediction or a quantile of it, if there is one, and otherwise follows from the job's
own progress (``quantiles``); until then it is unknown. Speeds by size are those predicted for its kind, power by limit
is measured when its kind first runs, and the draw of a GPU is the job's own so far.
"""
