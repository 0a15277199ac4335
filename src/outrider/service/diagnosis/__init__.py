"""The doctor of runs: reads the results and turns of a run, and finds the faults of the run by rules.

`statistics.py` has the intervals, `evidence.py` the counts of a run, `session_facts.py` the facts of one session from
its turns, `prompts.py` the comparison of prompts by line, `rules.py` the table of rules, `doctor_of_runs.py` the
reading of the store. Only `doctor_of_runs.py` awaits; the other modules are pure.
"""
