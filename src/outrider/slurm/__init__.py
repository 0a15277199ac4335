"""Builds the batch script of a Slurm job. The job runs a service on the first machine of its allocation, and `outrider
nodes join` on every machine.

`batch_script.py` writes the options and settings of one job. `job.sh` is the rest of the script, which is the same for
every job. This package does not run Slurm's programs and does not depend on the command line.
"""
