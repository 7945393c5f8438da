"""Causal attention of a chunk of queries against what is before it and itself."""

from pallas_kernels.prefill.api import prefill
from pallas_kernels.prefill.prefill_problem import Prefilled

__all__ = ["Prefilled", "prefill"]
