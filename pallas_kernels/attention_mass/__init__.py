"""Attention that each key gets from a set of queries, summed without storing the matrix of scores."""

from pallas_kernels.attention_mass.api import attention_mass, log_sum_exp
from pallas_kernels.attention_mass.mass_problem import Masses

__all__ = ["Masses", "attention_mass", "log_sum_exp"]
