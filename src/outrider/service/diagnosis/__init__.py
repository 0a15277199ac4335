"""The doctor of runs: reads the results and turns of a training run, and finds problems by rules.

`doctor_of_runs.py`: reads the store. It is the only module here that does input or output.
`evidence.py`: the counts of a run.
`session_facts.py`: the facts about one session, from its turns.
`prompts.py`: compares prompts line by line.
`statistics.py`: confidence intervals.
`rules.py`: the table of rules.
"""
