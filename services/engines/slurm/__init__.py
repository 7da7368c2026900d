"""The bridge to Slurm: mirrors its nodes and jobs, and holds, releases, requeues, shrinks or cancels those it steers.

Users keep ``sbatch``, ``srun`` and ``squeue``; Slurm places the jobs. A hold is a begin time that passes by itself: if
this process or the control plane is gone, Slurm goes on as it always did.
"""
