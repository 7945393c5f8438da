"""The TPU kernel, interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.decode_base import Case, DecodeBase, build

from pallas_kernels.ragged_decode import reference, tpu


SMALL = tpu.TpuConfig(rows=128, buffers=4)


class TestTpu(DecodeBase):
    layouts = ("stacked", "padded", "lanes")

    def layouts_of(self, case):
        fits = {"stacked": case.head_dim % 128 == 0, "padded": case.head_dim in (80, 96), "lanes": case.head_dim == 64}
        return tuple(name for name in self.layouts if fits[name])

    def fit(self, case):
        streams = case.dtype == jnp.int8 or case.alibi or case.with_logits
        return dataclasses.replace(case, page_size=128) if streams else case

    def run(self, problem):
        return jax.jit(lambda arrays: tpu.decode(dataclasses.replace(problem, **arrays), config=SMALL, interpret=True))(
            {"q": problem.q, "pages": problem.pages, "length": problem.length}
        )
