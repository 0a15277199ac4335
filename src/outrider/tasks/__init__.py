"""Tasks from data sets and from the formats of other systems.

Evaluators do not belong here: a task names its evaluator (see evaluators/).
"""
