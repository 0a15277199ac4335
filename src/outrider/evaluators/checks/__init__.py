"""Checks answers with third-party libraries. Each check has its own process, which can be killed and can only
calculate.

- `math_check.py`, `reasoning_check.py` and `swebench_check.py` define the checks.
- `math_text.py`, `math_units.py` and `math_reading.py` read a math answer as a value. `math_comparison.py` compares two
  values.
- `zygote.py` is the process from which checks are forked. `confinement.py` restricts this process and its forks.
- `pool.py` requests checks, in the service or on a node.
"""
