"""The range of each head of an ALiBi model, bounded from the weights alone (RazorAttention, section 3.1).

An ALiBi head takes l_h per token of distance off its logits. A bound on the rest of a logit therefore bounds how far
back attention can reach: beyond L_h = (bound - log eps) / l_h a token gets at most eps [2, appendix A.1].

Two bounds are computed for every query head, with W_Q and W_K its projections, gamma and b the weight and bias of the
norm before attention, M the model's width and d the head's:

* ``paper``, as printed: 2 |W_Q W_K^T|_2 (|gamma|^2 + |b|^2). It leaves out the 1 / sqrt(d) that logits are scaled by,
  and |gamma|^2 does not bound a norm's output where gamma differs from channel to channel.
* ``safe``, true of every input: 2 |W_Q W_K^T|_2 / sqrt(d) |x|^2 with |x| at most sqrt(M) max |gamma| + |b|: a norm's
  output before gamma has length at most sqrt(M). Biases of the projections are one more row of W_Q and W_K, which
  meets a 1 in x. The factor 2: a weight is compared with that of the query's own token, whose logit may be as negative
  as the other's is positive.

The norm of W_Q W_K^T comes from d x d products: with W^T W = S S^T for the keys, it is the root of the largest
eigenvalue of S^T (W_Q^T W_Q) S. Nothing of size M x M is formed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.model.alibi import slopes
from kvjax.model.decoder import DecoderLayer
from kvjax.model.params import logical
from kvjax.policies.profile import ModelShape, ScopeProfile, Table, model_name


def alibi_scopes(lm: LanguageModel, *, progress: Callable[[int, int], None] | None = None) -> ScopeProfile:
    """Bound what every head of an ALiBi model attends to.

    Args:
      lm: a model with ALiBi's biases.
      progress: called after each layer with the layers done and their number.

    Raises:
      UsageError: a model with rotary positions, whose heads no distance bounds.
    """
    config = lm.config
    if config.positional != "alibi":
        raise UsageError(
            "No distance bounds the heads of a rotary model; score them instead: use `kvjax calibrate retrieval-heads`."
        )
    paper, safe = [], []
    for done, layer in enumerate(lm.params.layers, 1):
        printed, sure = layer_bounds(layer)
        paper.append(printed)
        safe.append(sure)
        if progress is not None:
            progress(done, config.num_layers)
    steps = [slopes(config).reshape(-1)] * config.num_layers
    tables = (_table(np.asarray(rows)) for rows in (paper, safe, steps))
    return ScopeProfile(model_name(lm.name), ModelShape.of(config), *tables)


def layer_bounds(layer: DecoderLayer) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """(paper, safe) bounds of every query head of a layer, in the order in which they are stored."""
    config = layer.config
    weight = np.asarray(logical(layer.qkv), np.float64)  # [M, H, G + 2, d]
    gamma = np.asarray(layer.input_norm.weight[...], np.float64)
    bias = getattr(layer.input_norm, "bias", None)  # an RMSNorm has none
    beta = np.zeros_like(gamma) if bias is None else np.asarray(bias[...], np.float64)
    printed = 2 * product_norms(weight) * (gamma @ gamma + beta @ beta)
    reach = (np.sqrt(config.hidden_size) * np.abs(gamma).max() + np.linalg.norm(beta)) ** 2
    if config.weights is not None:
        # A token's channels are rounded to 127 steps of its largest: together they are off by at most this much of it.
        reach *= (1 + np.sqrt(config.hidden_size) / 254) ** 2
    if config.qkv_bias:
        weight = np.concatenate([weight, np.asarray(logical(layer.qkv_bias), np.float64)[None]])
        reach += 1
    sure = 2 * product_norms(weight) * config.attention_scale * reach
    return printed.reshape(-1), sure.reshape(-1)


def product_norms(weight: Float[np.ndarray, "M H S D"]) -> Float[np.ndarray, "H G"]:
    """|W_Q W_K^T|_2 of each of a KV head's G queries with its key; S = G + 2, values last."""
    columns = weight.transpose(1, 2, 3, 0)
    grams = columns @ columns.swapaxes(-1, -2)  # [H, S, D, D]
    values, vectors = np.linalg.eigh(grams[:, -2])
    root = vectors * np.sqrt(np.maximum(values, 0))[:, None]
    inner = root[:, None].swapaxes(-1, -2) @ grams[:, :-2] @ root[:, None]
    largest = np.linalg.eigvalsh((inner + inner.swapaxes(-1, -2)) / 2)[..., -1]
    return np.sqrt(np.maximum(largest, 0))


def _table(rows: Float[np.ndarray, "L N"]) -> Table:
    """Seven digits, never rounded down: a bound stays a bound."""
    with np.errstate(divide="ignore"):
        unit = 10.0 ** (np.floor(np.log10(np.maximum(rows, 1e-300))) - 6)
    return tuple(tuple(float(f"{x:.7g}") for x in row) for row in np.ceil(rows / unit) * unit)
