"""Frozen, hashable descriptions of a model: everything a compiled program may specialise on, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from kvjax.checks import number, whole_number
from kvjax.errors import UsageError, quoted

#: Channels, layers, heads and tokens of a model at most.
MOST_SIZE = 2**40
RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
Positional = Literal["rope", "alibi"]
NormKind = Literal["rms", "layer"]
MLPKind = Literal["gated_silu", "gelu"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its length scaling, with Hugging Face's names and defaults.

    Attributes:
      theta: base of the frequencies, ``inv_freq[i] = theta ** (-2 i / dim)``.
      kind: scaling rule; the fields below belong to some of the rules only.
      factor: how many times longer than the original context the model is meant to read.
      original_max_position: context in tokens before scaling (dynamic, yarn, longrope, llama3).
      low_freq_factor, high_freq_factor: llama3's band edges.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn's ramp and temperature.
      attention_factor: multiplies cos and sin; ``None`` derives it as the rule says.
      short_factor, long_factor: longrope's per-frequency divisors.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        number("the rotary base", self.theta, 0, open_below=True)
        number("the rotary scaling's factor", self.factor, 0, open_below=True)
        for divisor in (*self.short_factor, *self.long_factor):
            number("a rotary divisor", divisor, 0, open_below=True)
        if self.original_max_position is not None:
            whole_number("the context before rotary scaling", self.original_max_position, 1, MOST_SIZE)
        if self.kind == "llama3":
            number("low_freq_factor", self.low_freq_factor, 0, open_below=True)
            number("high_freq_factor", self.high_freq_factor, self.low_freq_factor, open_below=True)


def _size(name: str, value: Any, needed: str) -> None:
    """Refuse what is no size of a model."""
    if isinstance(value, int) and value < 1:
        raise UsageError(f"{name} is {quoted(value)}; {needed}.")
    whole_number(name, value, 1, MOST_SIZE)


def added(default: Any) -> Any:
    """A field of :class:`ModelConfig` that version 0.1 did not have, with what every model of then means."""
    return dataclasses.field(default=default, metadata={"added": True})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer; one decoder serves every family, and a family is a mapping to this.

    Attributes:
      family: the architecture's own name ("llama", "qwen2", "bloom").
      hidden_size, intermediate_size, vocab_size, num_layers: widths and depth.
      num_heads, num_kv_heads: query heads and key/value heads; the former is a multiple of the latter.
      head_dim: channels of one head.
      max_position: the model's context in tokens.
      positional: how attention knows positions: rotary embedding (``rope`` says which), or ALiBi's linear biases
        (``kvjax.model.alibi``), which need no parameters.
      rms_norm_eps: epsilon of every norm, whichever its kind.
      norm: root-mean-square norm, or layer norm (mean removed, with a bias).
      mlp: SiLU gated by a second projection, or one projection through GELU in its tanh form.
      embedding_norm: whether the token embeddings go through a norm of their own before the first layer.
      qk_norm: whether each head's queries and keys go through a root-mean-square norm before rotary embedding.
      qkv_bias, output_bias, mlp_bias: whether those projections add a bias.
      tie_embeddings: whether the output head is the token embedding.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    positional: Positional = "rope"
    norm: NormKind = "rms"
    mlp: MLPKind = "gated_silu"
    embedding_norm: bool = False
    qk_norm: bool = added(False)

    def __post_init__(self) -> None:
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"
        for name in (*sizes, "max_position"):
            _size(name, getattr(self, name), "a model needs at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second."
            )
        for name, known in (("positional", Positional), ("norm", NormKind), ("mlp", MLPKind)):
            if getattr(self, name) not in get_args(known):
                choices = " or ".join(map(repr, get_args(known)))
                raise UsageError(f"{name} is {quoted(getattr(self, name))}; choose {choices}.")
        number("rms_norm_eps", self.rms_norm_eps, 0)
        _size("head_dim", self.head_dim, "a head needs at least 1 channel")
        if self.positional == "rope" and self.head_dim % 2:
            raise UsageError(f"head_dim is {self.head_dim}; rotary embedding needs an even number of at least 2.")
        if self.qk_norm and self.positional != "rope":
            raise UsageError("qk_norm is for models with rotary embedding; ALiBi's scopes are those of plain queries.")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """The factor of q.k in the softmax: 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    def identity(self) -> dict[str, Any]:
        """The fields by which saved conversations know a model.

        A field that was added after version 0.1 is left out where it holds its default, so that a model has the
        identity that it was saved with.
        """
        known = dataclasses.asdict(self)
        unused = {f.name for f in dataclasses.fields(self) if f.metadata.get("added") and known[f.name] == f.default}
        return {name: value for name, value in known.items() if name not in unused}
