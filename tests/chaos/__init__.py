"""The campaign: faults by the dozen against a whole installation while jobs flow, and a model outside that checks.

faults      what can go wrong, when and for how long, drawn from a seed
links       connections between processes that can be cut, held up and slowed down
world       the installation: servers, services and agents, joined by links
client      a careful user: submits, cancels, switches policies, and remembers what was accepted
job         the job that is submitted: it counts its work, and notices a twin
watch       what really runs: the processes of jobs, as the kernel has them
checks      what must hold once the faults are over
campaign    storms and calms, until the time is up

``./test --chaos [--seed N] [--minutes M]`` runs it.
"""
