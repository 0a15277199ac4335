"""The evaluator that asks a language model: `questions.py` writes what it is asked and reads its grades, `evaluator.py`
asks."""
