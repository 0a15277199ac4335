"""Checks answers with third-party libraries, each answer in a killable process that can only calculate.

`math_check.py`, `reasoning_check.py` and `swebench_check.py` define the checks. `math_check.py` reads answers with
`math_text.py` (spelling), `math_units.py` and `math_reading.py` (values), and compares them with `math_comparison.py`.
`zygote.py` is the process from which checks are forked, and `confinement.py` restricts it and the forks. The service or
a node requests checks through `pool.py`. The evaluators are in the parent folder.
"""
