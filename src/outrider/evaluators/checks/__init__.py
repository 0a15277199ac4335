"""Checks of answers by third-party libraries, each in a process of its own, which can be killed and do nothing else.

What a check compares is in `math_check.py` and `reasoning_check.py`; `zygote.py` is the process that checks are forked
from, `confinement.py` what they are kept to, and `pool.py` the service's end. Evaluators are one folder up.
"""
