"""Measures policies: evaluations, their statistics and comparisons."""
