"""One query a row against the ragged page runs of its KV heads."""

from pallas_kernels.ragged_decode.api import Decoded, ragged_decode

__all__ = ["Decoded", "ragged_decode"]
