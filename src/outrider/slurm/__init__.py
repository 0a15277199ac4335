"""The batch script of a Slurm job: a service on the first node of its allocation, and a node of the service on each.

`batch_script.py` writes the script's head and its settings; `job.sh` is the rest, the same for every job. This package
runs none of Slurm's programs and is independent of the command line.
"""
