"""Cases of ``tests/golden/kvpress_choices.json``: a tiny model, and the policies whose choices kvpress recorded.

Weights, prompts and filters come from NumPy's frozen ``RandomState``; ``scripts/golden_kvpress.py`` has the press of
each case, and the test has what kvjax must choose. kvpress removes a fraction of the tokens; here it is what stays.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from support.family_cases import FamilyCase, random, values, write_folder

CHOICES = Path(__file__).parents[1] / "golden" / "kvpress_choices.json"
#: As many ids as the byte tokenizer of tests/toys.py has.
VOCAB = 259
RATIO = 0.25
#: Channels of the merged values that are recorded.
CHANNELS = 2


#: Grouped heads.
MODEL = FamilyCase(
    "kvpress_gqa",
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One policy on one prompt.

    Attributes:
      name: the case's, and its press's in the script.
      policy: kvjax's policy, as ``parse`` reads it.
      tokens: of the prompt.
    """

    name: str
    policy: str
    tokens: int = 160


CASES = (
    Case("streamingllm", "streamingllm:ratio=0.25"),
    Case("snapkv", "snapkv:ratio=0.25,window=16"),
    Case("pyramidkv", "pyramidkv:ratio=0.25,window=8,beta=4"),
    Case("tova", "tova:ratio=0.25"),
    Case("h2o", "h2o:ratio=0.25,recent=0"),
    Case("keydiff", "keydiff:ratio=0.25", tokens=157),
    Case("expected_attention", "expected_attention:ratio=0.25,epsilon=0"),
    Case("expected_attention_epsilon", "expected_attention:ratio=0.25", tokens=157),
    Case("expected_attention_mean", "expected_attention:ratio=0.25,covariance=False,values=False"),
    Case("adakv", "adaptive:ratio=0.25,inner=expected_attention"),
    Case("adakv_snapkv", "adaptive:ratio=0.25,floor=0.5,inner=snapkv(window=16)"),
    Case("criticalkv", "criticalkv:ratio=0.25,inner=snapkv(window=16)"),
    Case("criticalkv_expected", "criticalkv:ratio=0.25,inner=expected_attention(values=False)", tokens=157),
    Case("chunkkv", "chunkkv:ratio=0.25,inner=keydiff"),
    Case("chunkkv_rest", "chunkkv:ratio=0.25,inner=keydiff", tokens=157),
    Case("merged", "merged:ratio=0.25,inner=keydiff"),
    Case("finch", "finch:ratio=0.25,window=16"),
    Case("qfilters", "qfilters:ratio=0.25"),
    Case("compactor", "compactor:ratio=0.25,chunk=32,sketch=0", tokens=172),
    Case("kvzip_layer", "adaptive:ratio=0.25,floor=0,inner=kvzip(chunk=64)"),
    Case("kvzip_model", "adaptive:ratio=0.25,floor=0,scope=model,inner=kvzip(chunk=64)"),
)


def tensors() -> dict[str, np.ndarray]:
    """The model's weights under transformers' names, float32."""
    c = MODEL.config
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    wanted = {"model.embed_tokens.weight": [VOCAB, hidden], "model.norm.weight": [hidden]}
    for layer in range(c["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [heads, hidden],
            "self_attn.k_proj": [kv, hidden],
            "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, heads],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }.items():
            wanted[f"model.layers.{layer}.{name}.weight"] = shape
    return values(MODEL, wanted)


def folder(path: Path) -> Path:
    """Write the model's folder; return it."""
    return write_folder(MODEL, path, tensors())


def prompt(tokens: int) -> list[int]:
    """Token ids, all different: tokens are known by their values, which in the first layer are those of the id."""
    return random(f"gqa/{tokens}").permutation(VOCAB)[:tokens].tolist()


def filters() -> np.ndarray:
    """[L, H, D] a direction for every KV head, with which kvjax's score is the product."""
    c = MODEL.config
    shape = c["num_hidden_layers"], c["num_key_value_heads"], c["head_dim"]
    return random(f"{MODEL.name}/filters").standard_normal(shape).round(3).astype(np.float32)


def recorded() -> dict[str, list[Any]]:
    """The tokens that kvpress keeps, by case: of each layer and KV head, in order.

    "merged_values" has the first channels of those that "merged" keeps.
    """
    return json.loads(CHOICES.read_text())
