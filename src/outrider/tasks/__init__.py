"""Makes tasks from data sets and from the formats of other systems.

The evaluators that grade these tasks are in the folder evaluators/.
"""
