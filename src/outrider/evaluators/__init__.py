"""Evaluators grade sessions: each evaluator turns the outcome of a session into a verdict, or raises."""
