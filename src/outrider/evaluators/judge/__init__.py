"""The evaluator `judge`, which asks a language model. `questions.py` writes the questions and reads the grades.
`evaluator.py` sends the questions."""
