"""The agent of a node: owns its devices and running ranks, measures their energy, obeys the lease.

The agent may be killed at any moment: ranks run on under their shims, and the next agent finds them again.

shim         the process between the agent and one rank; kills the rank when its lease or time limit runs out, with or
             without an agent; notes the order of both output streams
ranks        the folder of one rank: the files shared with its shim; start, stop, adoption, what a dead shim leaves
gangs        which gangs this node runs: commands, generations, leases, states
environment  the variables that a job's process gets; options for `accelerate` and `deepspeed`, which do not read them
launch       from a start command to what a shim runs: one process on the node, or one for each device
containers   the command line that runs a job's image
progress     a job's progress, from its progress file, its log or its posts
logs         a rank's output, one stream or both in order, read by offset and kept within a size
devices/     the driver protocol; NVML and simulated devices
host_power   the CPU's energy: measured by RAPL or modelled
meter        energy of devices and host, split by owner into intervals
spool        intervals on disk until the control plane has them
inbox        commands from Redis
reporting    what every agent does: report its devices and their energy; the agent that does nothing else, on a host
             whose jobs an engine runs
agent        the loops that tie these together
"""
