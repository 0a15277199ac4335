"""The batch script of a Slurm job, which runs a service on the first machine of its allocation, and one node of this
service on each machine.

`batch_script.py` writes the script's head and its settings; `job.sh` is the rest, the same for every job. This package
runs none of Slurm's programs and is independent of the command line.
"""
