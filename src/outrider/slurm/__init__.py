"""The batch script of a Slurm job: a service on the first node of its allocation, and a node of it on each.

`batch_script.py` writes the script's head and its settings, `job.sh` is the rest, the same for every job. Nothing here
runs Slurm's programs, or knows the command line.
"""
