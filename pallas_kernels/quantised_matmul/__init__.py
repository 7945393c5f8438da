"""Products of activations with matrices of 4 or 8 bits that have a scale for each group of inputs."""

from pallas_kernels.quantised_matmul.api import IMPLEMENTATIONS, quantised_matmul

__all__ = ["IMPLEMENTATIONS", "quantised_matmul"]
