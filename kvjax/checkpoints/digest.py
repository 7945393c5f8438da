"""A digest of weights, which tells a fine-tuned model from its base, or a job's model from another of its shape."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.model.decoder import Decoder


def weights_digest(params: Decoder) -> str:
    """A digest of every vector and of the first rows of every matrix [in, out], as bfloat16.

    It is the same whatever dtype weights are held in, and whether or not they are stored transposed. Of a quantised
    matrix it is of the int8 numbers and of their scales: they give other results than the floats they came from.

    Training moves all of them; reading them takes milliseconds where reading every weight would take seconds.
    """
    seen = hashlib.sha256()
    for param in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        for leaf in jax.tree.leaves(param.get_value()):
            if leaf.ndim > 1:
                leaf = leaf[:64, :2].T if param.get_metadata("transposed", False) else leaf[:2, :64]
            seen.update(np.asarray(leaf).astype(np.float32).astype(jnp.bfloat16).tobytes())
    return seen.hexdigest()[:32]
