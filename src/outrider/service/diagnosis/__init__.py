"""The doctor of runs: reads the results and turns of a run, and finds problems by rules.

`doctor_of_runs.py`: reads the store. Only this module awaits; the others are pure.
`evidence.py`: the counts of a run.
`session_facts.py`: the facts of one session, from its turns.
`prompts.py`: compares prompts line by line.
`statistics.py`: confidence intervals.
`rules.py`: the table of rules.
"""
