"""Attention of one new token per row over a ragged, paged cache."""

from pallas_kernels.ragged_decode.api import IMPLEMENTATIONS, ragged_decode
from pallas_kernels.ragged_decode.decode_problem import Decoded
from pallas_kernels.ragged_decode.shared import Shared

__all__ = ["IMPLEMENTATIONS", "Decoded", "Shared", "ragged_decode"]
