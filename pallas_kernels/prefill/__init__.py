"""Causal attention of a chunk of a prompt's queries over earlier keys and the chunk's own."""

from pallas_kernels.prefill.api import prefill
from pallas_kernels.prefill.prefill_problem import Prefilled

__all__ = ["Prefilled", "prefill"]
