"""The doctor of runs: reads the results and turns of a training run, and finds problems by rules.

`doctor_of_runs.py`: reads the store. The other modules do no input or output.
`evidence.py`: the counts of a run.
`session_facts.py`: the facts about one session.
`prompts.py`: compares prompts line by line.
`statistics.py`: confidence intervals.
`rules.py`: the table of rules.
"""
