"""NumPy reference that computes every score at once; for tests."""

from __future__ import annotations

import numpy as np

from pallas_kernels.attention_mass import mass_problem as mass
from pallas_kernels.attention_mass import reference
from pallas_kernels.prefill.prefill_problem import Problem
from pallas_kernels.softmax import NOTHING, per_row


def prefill(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`pallas_kernels.prefill.prefill`."""
    batch = p.q.shape[0]
    offset, scale = per_row(p.offset, batch, "int32"), per_row(p.scale, batch, "float32")
    same = mass.Problem(p.q, p.k, offset, scale, p.kept, p.bias, p.block, p.window, p.soft_cap)
    scores = np.concatenate([x for x in reference.scores(same) if x is not None], axis=-1)
    values = [p.v] if p.kept is None else [p.v, p.kept.v]
    v = np.concatenate([np.asarray(x.astype("float32")) for x in values], axis=2)
    lse = reference.log_sum_exp(same)
    weight = np.where(scores > NOTHING, np.exp(scores - lse.astype(np.float64)[..., None]), 0)
    return np.einsum("bhgnt,bhtd->bhgnd", weight, v, optimize=True), lse
