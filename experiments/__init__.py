"""Runnable studies: `python -m experiments.gep` is the first to try."""
