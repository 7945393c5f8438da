"""Every weight of a decoder, given what a kind of checkpoint calls its tensors.

A layout is a table of names; the configuration says which of them there are. Projections of attention and the halves of
a gated MLP may be tensors of their own or rows of one, and rotary channels may be stored in pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import numpy as np

from kvjax.checkpoints.families.family import Place, Weight, input_last, output_first, transposed, unchanged
from kvjax.model.config import ModelConfig
from kvjax.model.experts import Experts

#: How a fused tensor orders queries, keys and values: all of each one after the other, or of KV head after KV head.
Fused = Literal["one after the other", "by head"]
#: Which rotary channels form a pair: i and i + half, as kvjax has them, or 2 i and 2 i + 1.
Pairs = Literal["halves", "neighbours"]
Change = Callable[[np.ndarray], np.ndarray]

#: Names of a llama's norms, by parameter, as many families have them.
LLAMA_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
GGUF_NORMS = {
    "input_norm": "attn_norm",
    "post_attention_norm": "ffn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_output_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts, as :class:`Layout` has those of the rest.

    Attributes:
      router: of the tensor that chooses among them.
      gate, up, down: of each expert, with its number as ``{}``; or of one tensor that holds all of them.
      gate_up: of one tensor [E, M, 2 F] in the place of both, every other output a gate's, without a ``.weight`` to its
        name, as ``down`` is [E, F, M] then; their biases' names end in ``_bias``.
      shared: gate, up and down of the MLP for all tokens; ``shared_gate``, what its result is multiplied by.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    gate_up: str = ""
    shared: tuple[str, str, str] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names of tensors, without their ``.weight`` and ``.bias``; those of a layer follow ``layer``.

    Attributes:
      layer: the beginning of a layer's names, with its number as ``{}``.
      embedding, norm, head: of the whole model; ``embedding_norm`` where it has one.
      q, k, v: of attention, or ``qkv`` of all three, in the order ``fused``.
      out: attention's output projection. sinks: its softmaxes' own logits, the whole of the name.
      gate, up: of the MLP, or ``gate_up`` of both, the gate first; ``down``.
      experts: their names. norms: by the parameter that they fill; those of single heads with their number as ``{}``.
      pairs: see :data:`Pairs`.
      change_head, change_norm: what becomes of the head's rows, and of norms' weights, as they are read.
    """

    layer: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    embedding_norm: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    fused: Fused = "one after the other"
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    down: str = "mlp.down_proj"
    experts: ExpertNames = ExpertNames()
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NORMS)
    pairs: Pairs = "halves"
    change_head: Change | None = None
    change_norm: Change | None = None


#: transformers' names of a llama, which are the defaults.
LLAMA_LAYOUT = Layout()
#: llama.cpp's names.
GGUF = Layout(
    layer="blk.{}.",
    embedding="token_embd",
    norm="output_norm",
    head="output",
    embedding_norm="token_embd_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    out="attn_output",
    sinks="attn_sinks.weight",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    experts=ExpertNames(
        router="ffn_gate_inp",
        gate="ffn_gate_exps",
        up="ffn_up_exps",
        down="ffn_down_exps",
        shared=("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
        shared_gate="ffn_gate_inp_shexp",
    ),
    norms=GGUF_NORMS,
)


def weights_of(config: ModelConfig, layout: Layout) -> Iterable[Weight]:
    """Every weight of the model, as checkpoints of this layout hold it.

    They are made while they are gone through, as often as that is: a corrupt count of layers makes no list.
    """
    return _Weights(config, layout)


@dataclasses.dataclass(frozen=True)
class _Weights:
    config: ModelConfig
    layout: Layout

    def __iter__(self) -> Iterator[Weight]:
        return _weights(self.config, self.layout)


def _weights(config: ModelConfig, layout: Layout) -> Iterator[Weight]:
    vocabulary, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    # A tied table is stored once, as the head.
    target, view = ("head", transposed) if config.tie_embeddings else ("embedding", unchanged)
    yield _weight(layout.embedding + ".weight", vocabulary, target, view)
    if config.embedding_norm:
        yield from _norm(config, layout.embedding_norm, hidden, "embedding_norm", layout.change_norm)
    for index in range(config.num_layers):
        hf, own, layer = layout.layer.format(index), f"layers.{index}.", config.layer(index)
        mlp = {"experts": layer.experts, "intermediate_size": layer.intermediate_size}
        for weight in _layer(dataclasses.replace(config, **mlp), layout):
            name = hf + weight.hf
            yield dataclasses.replace(weight, hf=name, gguf=name, param=own + weight.param)
    yield from _norm(config, layout.norm, hidden, "norm", layout.change_norm)
    if not config.tie_embeddings:
        yield _weight(layout.head + ".weight", vocabulary, "head", transposed, change=layout.change_head)
    if config.head_bias:
        yield _weight(layout.head + ".bias", (config.vocab_size,), "head_bias", unchanged)


def _weight(
    name: str,
    shape: tuple[int, ...],
    param: str,
    place: Place,
    rows: range | np.ndarray | None = None,
    change: Change | None = None,
) -> Weight:
    return Weight(name, name, shape, param, place, rows, change)


def _norm(config: ModelConfig, name: str, size: int, param: str, change: Change | None) -> Iterator[Weight]:
    yield _weight(f"{name}.weight", (size,), f"{param}.weight", unchanged, change=change)
    if config.norm == "layer" and config.norm_bias:
        yield _weight(f"{name}.bias", (size,), f"{param}.bias", unchanged)


def _layer(config: ModelConfig, layout: Layout) -> Iterator[Weight]:
    """The weights of one layer, by the rest of their names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _attention(config, layout)
    if config.attention_sinks:
        yield _weight(layout.sinks, (config.num_heads,), "sinks", unchanged)
    yield from _closing(layout.out, (hidden, config.num_heads * config.head_dim), "out", config.output_bias)
    if config.experts is not None:
        yield from _experts(config, config.experts, layout.experts)
        gate, up, down = layout.experts.shared
        layout = dataclasses.replace(layout, gate=gate, up=up, down=down)
    if config.dense_mlp and config.gated:
        yield from _gated(config, layout)
    elif config.dense_mlp:
        yield _weight(layout.up + ".weight", (inner, hidden), "up", transposed)
        if config.mlp_bias:
            yield _weight(layout.up + ".bias", (inner,), "up_bias", unchanged)
    if config.dense_mlp:
        yield from _closing(layout.down, (hidden, inner), "down", config.mlp_bias)
    yield from _norms(config, layout)


def _closing(name: str, shape: tuple[int, int], param: str, biased: bool) -> Iterator[Weight]:
    yield _weight(f"{name}.weight", shape, param, output_first)
    if biased:
        yield _weight(f"{name}.bias", shape[:1], f"{param}_bias", unchanged)


def _attention(config: ModelConfig, layout: Layout) -> Iterator[Weight]:
    """Queries, keys and values: three tensors, or rows of one."""
    group, dim, hidden = config.group_size, config.head_dim, config.hidden_size
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    places: list[Place] = [_queries(group), lambda x: x[..., group, :], lambda x: x[..., group + 1, :]]
    if layout.qkv and layout.fused == "by head":
        rows = sum(counts) * dim
        yield _weight(layout.qkv + ".weight", (rows, hidden), "qkv", input_last(unchanged))
        if config.qkv_bias:
            yield _weight(layout.qkv + ".bias", (rows,), "qkv_bias", unchanged)
        return
    start = 0
    for name, heads, place in zip((layout.q, layout.k, layout.v), counts, places, strict=True):
        paired = layout.pairs == "neighbours" and name != layout.v
        taken: range | np.ndarray | None = _pairs_apart(heads, dim, config.rotary_channels) if paired else None
        total = heads * dim
        if layout.qkv:
            taken = range(start, start + total) if taken is None else start + taken
            start, total, name = start + total, sum(counts) * dim, layout.qkv
        yield _weight(name + ".weight", (total, hidden), "qkv", input_last(place), taken)
        if config.qkv_bias:
            yield _weight(name + ".bias", (total,), "qkv_bias", place, taken)


def _queries(group: int) -> Place:
    return lambda values: values[..., :group, :]


def _pairs_apart(heads: int, dim: int, rotary: int) -> np.ndarray:
    """The rows of a projection whose rotary channels 2 i and 2 i + 1 are a pair, in the order of i and i + half."""
    channels = np.arange(dim)
    channels[:rotary] = np.arange(rotary).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * dim + channels).reshape(-1)


def _gated(config: ModelConfig, layout: Layout) -> Iterator[Weight]:
    """The gate and what it gates: two tensors, or halves of one."""
    inner, hidden = config.intermediate_size, config.hidden_size
    for part, name in enumerate((layout.gate, layout.up)):
        rows = None
        if layout.gate_up:
            name, rows = layout.gate_up, range(part * inner, (part + 1) * inner)
        total = inner if rows is None else 2 * inner
        yield _weight(name + ".weight", (total, hidden), "gate_up", input_last(_half(part)), rows)
        if config.mlp_bias:
            yield _weight(name + ".bias", (total,), "gate_up_bias", _half(part), rows)


def _experts(config: ModelConfig, experts: Experts, names: ExpertNames) -> Iterator[Weight]:
    """The router and the experts: tensors of each, or of all together."""
    hidden, inner, count = config.hidden_size, experts.inner, experts.count
    yield _weight(f"{names.router}.weight", (count, hidden), "experts.router", transposed)
    if experts.biased:
        yield _weight(f"{names.router}.bias", (count,), "experts.router_bias", unchanged)
    if names.gate_up:
        for name, shape, param, place in (
            (names.gate_up, (hidden, 2 * inner), "gate_up", _halves_in_turn),
            (names.down, (inner, hidden), "down", unchanged),
        ):
            yield _weight(name, (count, *shape), f"experts.{param}", place)
            if experts.biased:
                yield _weight(f"{name}_bias", (count, shape[1]), f"experts.{param}_bias", place)
        return
    if experts.shared_inner:
        # llama.cpp writes it as a vector.
        shape = (1, hidden) if "{}" in names.gate else (hidden,)
        place = transposed if len(shape) == 2 else lambda values: values[:, 0]
        yield _weight(f"{names.shared_gate}.weight", shape, "experts.shared_gate", place)
    halves = [(name, (inner, hidden), "gate_up", input_last(_half(i))) for i, name in enumerate((names.gate, names.up))]
    for name, shape, param, place in (*halves, (names.down, (hidden, inner), "down", transposed)):
        if "{}" in name:
            for expert in range(count):
                yield _weight(f"{name.format(expert)}.weight", shape, f"experts.{param}", _of_expert(expert, place))
        else:
            yield _weight(f"{name}.weight", (count, *shape), f"experts.{param}", _of_all(place))
    if experts.biased:
        for i, name in enumerate((names.gate, names.up)):
            yield _weight(f"{name}.bias", (count, inner), "experts.gate_up_bias", _half(i))
        yield _weight(f"{names.down}.bias", (count, hidden), "experts.down_bias", unchanged)


def _halves_in_turn(values: np.ndarray) -> np.ndarray:
    """The place of a tensor whose last axis has a gate's channel, what it gates, the next gate's and so on."""
    return values.swapaxes(-1, -2)


def _of_expert(expert: int, place: Place) -> Place:
    return lambda values: place(values[expert])


def _of_all(place: Place) -> Place:
    """The place of a tensor that holds all experts one after the other, given that of one of them."""

    def view(values: np.ndarray) -> np.ndarray:
        first = place(values[0])
        return np.lib.stride_tricks.as_strided(
            first, (len(values), *first.shape), (values.strides[0], *first.strides), writeable=True
        )

    return view


def _half(part: int) -> Place:
    return lambda values: values[..., part, :]


def _norms(config: ModelConfig, layout: Layout) -> Iterator[Weight]:
    """The layer's norms."""
    pre = ["input_norm", *([] if config.shared_norm else ["post_attention_norm"])]
    post = ["attention_output_norm", "mlp_output_norm"]
    for param in (pre if config.norm_order != "post" else []) + (post if config.norm_order != "pre" else []):
        yield from _norm(config, layout.norms[param], config.hidden_size, param, layout.change_norm)
    group, dim = config.group_size, config.head_dim
    if config.qk_norm:
        for param in ("q_norm", "k_norm"):
            yield from _norm(config, layout.norms[param], dim, param, layout.change_norm)
    if config.qk_norm_across_heads or config.qk_norm_by_head:
        places: dict[str, tuple[int, Place]] = {
            "q_norm": (config.num_heads, _queries(group)),
            "k_norm": (config.num_kv_heads, lambda values: values[..., group, :]),
        }
        change = None
        if layout.pairs == "neighbours":
            order = _pairs_apart(1, dim, config.rotary_channels)
            change = lambda rows: rows[..., order]  # noqa: E731 - of a head's channels, which rotation pairs
        for param, (heads, place) in places.items():
            name = layout.norms[param] + ".weight"
            if config.qk_norm_across_heads:
                yield _weight(name, (heads * dim,), "qk_norm", place)
            elif "{}" not in name:
                yield _weight(name, (heads, dim), "qk_norm", place, change=change)
            else:
                for head in range(heads):
                    yield _weight(name.format(head), (dim,), "qk_norm", _of_head(head, heads, place), change=change)


def _of_head(head: int, heads: int, place: Place) -> Place:
    """The place of one head's part of a tensor, given that of all of them."""

    def view(values: np.ndarray) -> np.ndarray:
        found = place(values)
        if found.ndim == 2:
            return found[head]
        return found[head // found.shape[1], head % found.shape[1]]

    return view
