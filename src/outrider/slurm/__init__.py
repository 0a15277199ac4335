"""The batch script of a Slurm job. The job runs a service on the first machine of its allocation, and `outrider nodes
join` on every machine.

`batch_script.py` writes the script's head and its settings; `job.sh` is the rest, the same for every job. The Python
code of this package does not run Slurm's programs, and does not depend on the command line.
"""
