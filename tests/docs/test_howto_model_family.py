"""``docs/howto/model_family.md``: its code runs exactly as printed, and every tensor is where the decoder uses it."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.howto import run_page
from support.recall.oracle import forward_of

import kvjax
from kvjax.checkpoints.families import FAMILIES
from kvjax.runtime.prefill import logits_of

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/model_family.md"


def test_the_page_adds_a_family(tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax.checkpoints.families.FAMILIES", dict(FAMILIES))
    page = run_page(PAGE, tmp_path, {"__name__": "model_family"})
    assert len(page["output"].tokens) == 16 and page["output"].finish_reason == "length"
    with pytest.raises(kvjax.WeightsError, match="sliding window"):
        page["from_hf"](page["settings"] | {"window": 8}, "config.json")
    # A llama of the same tensors, computed in NumPy.
    t, llama = page["tensors"], {}
    names = {"words": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(2):
        block, layer = f"blocks.{i}.", f"model.layers.{i}."
        names |= {block + "attention_norm": layer + "input_layernorm", block + "out": layer + "self_attn.o_proj"}
        names |= {block + "mlp_norm": layer + "post_attention_layernorm"}
        names |= {block + part: f"{layer}mlp.{part}_proj" for part in ("gate", "up", "down")}
        for part, rows in zip("qkv", np.split(t[block + "qkv.weight"], 3), strict=True):
            llama[f"{layer}self_attn.{part}_proj.weight"] = rows
    llama |= {f"{theirs}.weight": t[f"{ours}.weight"] for ours, theirs in names.items()}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 2}
    tokens = np.arange(40) * 7 % 256
    want, _ = forward_of(sizes | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}, llama, tokens)
    found = logits_of(page["lm"].params, jnp.asarray(tokens)[None], jnp.array([40]))[0]
    np.testing.assert_allclose(found, want, atol=1e-4 * want.std())
