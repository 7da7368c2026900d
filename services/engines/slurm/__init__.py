"""The bridge to Slurm: mirrors its nodes and jobs, and holds, releases, requeues and ranks the jobs that it may steer.

Users keep ``sbatch``, ``srun`` and ``squeue``; Slurm places the jobs. A hold is a begin time that passes by itself: if
this process is gone, or the control plane is, Slurm goes on as it always did.
"""
