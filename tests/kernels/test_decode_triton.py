"""The Triton kernel, interpreted, and lowered for CUDA; ``test_on_hardware.py`` runs it on a GPU."""

import dataclasses

import jax
from kernels.decode_base import Case, DecodeBase

from pallas_kernels.ragged_decode import triton
from pallas_kernels.ragged_decode.triton import TritonConfig


class TestTriton(DecodeBase):
    layouts = ("stacked", "padded", "lanes")

    def run(self, problem):
        config = TritonConfig(pages=4, block=32)
        return jax.jit(
            lambda arrays: triton.decode(dataclasses.replace(problem, **arrays), config=config, interpret=True)
        )({"q": problem.q, "pages": problem.pages, "length": problem.length})
