"""Checks answers with third-party libraries. Each check runs in its own process, which can be killed and can only
calculate.

- `math_check.py`, `reasoning_check.py` and `swebench_check.py` define the checks.
- `math_text.py`, `math_units.py` and `math_reading.py` turn a math answer into a value. `math_comparison.py` compares
  two values.
- `zygote.py` is the process from which checks are forked. `confinement.py` restricts it and its forks.
- `pool.py` sends checks to the zygote, from the service or from a node.
"""
