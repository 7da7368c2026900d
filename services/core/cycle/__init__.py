"""One scheduling round: a snapshot goes in, a checked plan comes out.

``snapshot``: what a policy sees; ``plan``: what it may ask for; ``policy``: the protocol between the two;
``reconcile``: the way from "these jobs should run at these sizes" (a ``ranking``) to actions, by ``capacity``,
``filling`` and ``placing``; ``rounds``: what kind of round it is; ``sifting``: what it need not look at; ``placers``:
the ways to place, ``buddy`` and ``graph_placing`` among them; ``services``: what is placed before any policy decides;
``validate``: the checks of every plan; ``run_cycle``: the round itself, which the live scheduler and the simulator
share.
"""
