"""The evaluator that queries a language model. `questions.py` writes the questions and reads the grades. `evaluator.py`
sends the questions."""
