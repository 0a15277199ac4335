"""The batch script of a Slurm job. The job runs a service on the first machine of its allocation, and `outrider nodes
join` on every machine.

`batch_script.py` writes the script's head and its settings; `job.sh` is the rest, the same for every job. Python code
of this package runs none of Slurm's programs and is independent of the command line.
"""
