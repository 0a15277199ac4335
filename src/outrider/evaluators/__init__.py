"""Evaluators: each turns the outcome of a session into a verdict, or raises."""
