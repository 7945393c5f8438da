"""Float32 reference, one head at a time; for tests."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.softmax import NEG


def decode(p: Problem) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`."""
    p = p.own_rows()
    batch, _, group, _ = p.q.shape
    page_size = p.pages.shape[2]
    q = p.q.astype(jnp.float32)
    k, v = p.pages.keys().astype(jnp.float32), p.pages.values().astype(jnp.float32)
    if p.v_scale is not None:
        v = v * p.v_scale[..., None]
    outs, lses, logits = [], [], []
    for h in range(len(p.runs)):
        # Where runs are by row, a head is given all pages; its slots are those from its own first page on.
        start, count = (0, p.pages.shape[1]) if p.by_row else (int(p.first_page[h]), p.runs[h])
        run = slice(start, start + count)
        kh, vh = (x[:, run].reshape(batch, count * page_size, -1) for x in (k, v))
        if p.k_scale is not None:
            kh = kh * p.k_scale[:, h, None]
        slot = jnp.arange(count * page_size)
        if p.by_row:
            slot = slot - p.first_page[:, h, None] * page_size
        visible = (slot >= 0) & (slot < p.length[:, h, None])
        bias = jnp.zeros((batch, group, count * page_size))
        if p.position is not None and p.query_position is not None:
            distance = p.position[:, run].reshape(batch, -1) - p.query_position[:, None]
            if p.slopes is not None:
                bias = bias + jnp.asarray(p.slopes[h])[:, None] * distance[:, None]
            if p.window is not None:
                visible &= distance > -p.window
        elif p.window is not None:
            visible &= slot >= p.length[:, h, None] - p.window
        if p.log_mass is not None:
            bias = bias + jnp.where(slot == 0, p.log_mass[:, h, None], 0.0)[:, None]
        raw = jnp.einsum("bgd,bsd->bgs", q[:, h], kh, precision="highest")

        def scores(scale, raw=raw, bias=bias, visible=visible):
            s = raw * scale
            s = s if p.soft_cap is None else p.soft_cap * jnp.tanh(s / p.soft_cap)
            return jnp.where(visible[:, None], s + bias, NEG)

        s = scores(p.scale)
        peak = s.max(axis=-1, keepdims=True)
        weight = jnp.where(visible[:, None], jnp.exp(s - peak), 0.0)
        mass = weight.sum(axis=-1, keepdims=True)
        out = jnp.einsum("bgs,bsd->bgd", weight, vh, precision="highest") / jnp.where(mass > 0, mass, 1.0)
        outs.append(out)
        lses.append(jnp.where(mass > 0, peak + jnp.log(jnp.maximum(mass, 1e-37)), NEG)[..., 0])
        returned = scores(p.scale if p.logits_scale is None else p.logits_scale)
        logits.append(returned.reshape(batch, group, count, page_size).swapaxes(1, 2))
    out = jnp.stack(outs, axis=1).astype(p.q.dtype)
    lse = jnp.stack(lses, axis=1)
    if not p.with_logits:
        return Decoded(out, lse, None)
    # A slot is visible to its own head alone, and NEG in the scores of the others.
    return Decoded(out, lse, functools.reduce(jnp.maximum, logits) if p.by_row else jnp.concatenate(logits, axis=1))
