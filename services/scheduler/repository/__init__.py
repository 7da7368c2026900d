"""All SQL of the scheduler, by subject; queries return typed rows, commands change rows in the caller's transaction.

``rounds`` has the policy in force, its memory and past plans; ``snapshots`` what a snapshot is loaded from;
``gangs`` allocations and what was reported about them; ``jobs`` their states and events; ``node_power`` nodes that are
powered down and woken; ``measurements`` gangs run at each of their devices' controls; ``profiles`` what was learned
from that; ``predictions`` predicted lengths; ``outbox`` commands on their way to nodes; ``audit`` what operators did.
"""
