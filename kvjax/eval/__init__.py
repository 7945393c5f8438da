"""Measuring what a compressed cache still knows: task generators, scorers, and runners over a loaded model."""
