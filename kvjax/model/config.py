"""Frozen, hashable descriptions of a model: everything a compiled program may specialise on, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from kvjax.checks import number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.model.experts import Experts
from kvjax.model.group_quantised import GroupFormat
from kvjax.model.quantised import Weights, check_weights

#: Channels, layers, heads and tokens of a model at most.
MOST_SIZE = 2**40
RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
Positional = Literal["rope", "alibi", "none"]
NormKind = Literal["rms", "layer"]
NormOrder = Literal["pre", "post", "both"]
MLPKind = Literal["gated_silu", "gated_gelu", "gelu", "gelu_exact"]


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


#: Forms of a checkpoint's own numbers by the name of a matrix, for all layers or for each.
Kept = tuple[tuple[str, tuple[Weights | GroupFormat | None, ...]], ...]
_ADDED = {"added": True}


def added(default: Any) -> Any:
    """A field of :class:`ModelConfig` that version 0.1 did not have, with what every model of then means."""
    return dataclasses.field(default=default, metadata=_ADDED)


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
        (``kvjax.model.alibi``), which need no parameters; or "none", of single layers of a rotary model.
      rms_norm_eps: epsilon of every norm, whichever its kind.
      norm: root-mean-square norm, or layer norm (mean removed, with a bias unless ``norm_bias`` is false).
      norm_order: whether a layer norms what attention and the MLP read ("pre"), what they give ("post"), or both.
      norm_offset: whether norms multiply by 1 + their weight.
      mlp: SiLU or GELU gated by a second projection, or one projection through GELU; GELU is the tanh form, but for
        "gelu_exact".
      parallel_block: whether attention and the MLP read the same hidden states, and are added together;
        ``shared_norm`` says that they share one norm.
      embedding_norm: whether the token embeddings go through a norm of their own before the first layer.
      qk_norm: whether each head's queries and keys go through a root-mean-square norm before rotary embedding.
      qk_norm_across_heads: whether all heads' queries together do, and all keys.
      qk_norm_by_head: whether each head's do through a norm of the model's kind, with weights of its own and no bias.
      qkv_bias, output_bias, mlp_bias, head_bias: whether those projections add a bias.
      tie_embeddings: whether the output head is the token embedding.
      no_rotary_layers: layers of a rotary model that apply no rotary embedding.
      experts: MLPs of which a router chooses for each token, in place of the MLP or beside it.
      windows: of each layer the tokens that a query sees, its own included, or None in a global layer; one entry is all
        layers', and none says that all are global.
      window_rope: the rotary embedding of the layers with a window, where it is another.
      rotary_dim: leading channels of a head that get rotary embedding; None for all.
      attention_multiplier: the factor of q.k in the softmax; None for 1 / sqrt(head_dim).
      attention_soft_cap: bounds the scores in the softmax by cap tanh(score / cap); None does not.
      attention_sinks: whether each query head's softmax has one more logit, a learned one that brings no value.
      embedding_scale, residual_scale, logit_scale: factors of embeddings, of what attention and the MLP add, of logits.
      logit_soft_cap: bounds logits by cap tanh(logits / cap); None does not.
      weights: how matrices are stored: "int8" or "fp8" (``kvjax.model.quantised``), "int4"
        (``kvjax.model.group_quantised``; the embedding and the head as int8), "file" (as ``kept`` says), or None for
        floats.
      kept: how a quantised checkpoint's own numbers are stored, by the names of :meth:`weights_of`: one form of all
        layers, or one for each; what is not named is floats.
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
    qk_norm_across_heads: bool = added(False)
    norm_order: NormOrder = dataclasses.field(default="pre", metadata=_ADDED)
    norm_offset: bool = added(False)
    norm_bias: bool = added(True)
    parallel_block: bool = added(False)
    shared_norm: bool = added(False)
    head_bias: bool = added(False)
    no_rotary_layers: tuple[int, ...] = added(())
    experts: Experts | None = dataclasses.field(default=None, metadata=_ADDED)
    windows: tuple[int | None, ...] = added(())
    window_rope: RopeConfig | None = dataclasses.field(default=None, metadata=_ADDED)
    rotary_dim: int | None = added(None)
    attention_multiplier: float | None = added(None)
    attention_soft_cap: float | None = added(None)
    attention_sinks: bool = added(False)
    qk_norm_by_head: bool = added(False)
    embedding_scale: float = added(1.0)
    residual_scale: float = added(1.0)
    logit_scale: float = added(1.0)
    logit_soft_cap: float | None = added(None)
    weights: Weights | None = dataclasses.field(default=None, metadata=_ADDED)
    kept: Kept = dataclasses.field(default=(), metadata={"identity": False})

    def __post_init__(self) -> None:
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"
        for name in (*sizes, "max_position"):
            _size(name, getattr(self, name), "a model needs at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second."
            )
        kinds = (("positional", Positional), ("norm", NormKind), ("norm_order", NormOrder), ("mlp", MLPKind))
        for name, known in kinds:
            if getattr(self, name) not in get_args(known):
                *others, last = map(repr, get_args(known))
                choices = f"{', '.join(others)} or {last}"
                raise UsageError(f"{name} is {quoted(getattr(self, name))}; choose {choices}.")
        number("rms_norm_eps", self.rms_norm_eps, 0)
        _size("head_dim", self.head_dim, "a head needs at least 1 channel")
        if self.positional == "rope" and self.rotary_dim is None and self.head_dim % 2:
            raise UsageError(f"head_dim is {self.head_dim}; rotary embedding needs an even number of at least 2.")
        if self.rotary_dim is not None:
            whole_number("rotary_dim", self.rotary_dim, 2, self.head_dim)
            if self.rotary_dim % 2:
                raise UsageError(f"rotary_dim is {self.rotary_dim}; rotary embedding needs an even number of channels.")
        self._check_features()

    def _check_features(self) -> None:
        """Refuse factors that are none, and features that do not go together."""
        check_weights(self.weights)
        factors = "attention_multiplier", "embedding_scale", "residual_scale", "logit_scale"
        for name in (*factors, "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 0, open_below=True)
        for window in self.windows:
            if window is not None:
                whole_number("a layer's window", window, 1, MOST_SIZE)
        if len(self.windows) not in (0, 1, self.num_layers):
            raise UsageError(f"windows has {len(self.windows)} entries for {self.num_layers} layers; give one a layer.")
        if self.positional == "alibi" and (self.sliding or self.attention_soft_cap is not None):
            raise UsageError("Windows and soft caps of attention are for rotary models; ALiBi has neither.")
        if self.positional == "alibi" and self.attention_sinks:
            raise UsageError("attention_sinks is for models with rotary embedding; ALiBi's scopes know of no sink.")
        norms = [name for name in ("qk_norm", "qk_norm_across_heads", "qk_norm_by_head") if getattr(self, name)]
        if norms and self.positional == "alibi":
            raise UsageError("qk_norm is for models with rotary embedding; ALiBi's scopes are those of plain queries.")
        if len(norms) > 1:
            raise UsageError(f"Queries and keys go through one norm; choose one of {' and '.join(norms)}.")
        if self.parallel_block and self.norm_order != "pre":
            raise UsageError(f"A parallel block norms what it reads; norm_order is {self.norm_order!r}.")
        if self.positional == "alibi" and (self.norm_order == "post" or self.norm_offset):
            raise UsageError(
                "ALiBi's scopes bound normed inputs; norm_order 'post' and norm_offset are for rotary models."
            )
        if self.norm == "layer" and self.norm_offset:
            raise UsageError("norm_offset is of root-mean-square norms.")
        if self.shared_norm and not self.parallel_block:
            raise UsageError("shared_norm is of parallel blocks; set parallel_block.")

    def layer(self, index: int) -> ModelConfig:
        """The model as one of its layers sees it: ``positional``, ``rope`` and ``window`` are that layer's own."""
        window = self.window_of(index)
        own: dict[str, Any] = {}
        if index in self.no_rotary_layers:
            own = {"positional": "none", "no_rotary_layers": ()}
        if self.windows:
            own |= {"windows": () if window is None else (window,), "window_rope": None}
        if window is not None and self.window_rope is not None:
            own["rope"] = self.window_rope
        if self.experts is not None and index in self.experts.dense_layers:
            own["experts"] = None
        elif self.experts is not None:
            own["experts"] = dataclasses.replace(self.experts, dense_layers=())
            own["intermediate_size"] = self.experts.shared_inner or self.experts.inner
        if any(len(forms) > 1 for _, forms in self.kept):
            own["kept"] = tuple((name, forms[index : index + 1] or forms) for name, forms in self.kept)
        return dataclasses.replace(self, **own) if own else self

    def window_of(self, layer: int) -> int | None:
        """The tokens that a query of this layer sees, its own included; None where it sees all."""
        return self.windows[layer if len(self.windows) > 1 else 0] if self.windows else None

    @property
    def window(self) -> int | None:
        """The window of what :meth:`layer` gives."""
        return self.window_of(0)

    @property
    def windows_by_layer(self) -> tuple[int | None, ...]:
        """:meth:`window_of` every layer; empty where all layers are global."""
        return tuple(map(self.window_of, range(self.num_layers))) if self.sliding else ()

    @property
    def sliding(self) -> bool:
        """Whether any layer has a window."""
        return any(window is not None for window in self.windows)

    def stored_as(self, weights: Weights | None) -> ModelConfig:
        """The model with its matrices stored otherwise.

        Raises:
          UsageError: there is no such form, or "file" was asked for and the checkpoint's numbers are floats.
        """
        kept = self.kept if check_weights(weights) == "file" else ()
        if weights == "file" and not kept:
            raise UsageError(
                'weights is "file", which keeps the numbers of a quantised checkpoint, and this one holds floats, or '
                'its weights are not on this machine (`kvjax fetch` brings them); choose "int8" or "int4".'
            )
        return dataclasses.replace(self, weights=weights, kept=kept)

    def weights_of(self, param: str) -> Weights | GroupFormat | None:
        """How the matrix of this name is stored; of a layer's, by its name in what :meth:`layer` gives."""
        if self.weights == "file":
            return dict(self.kept).get(param, (None,))[0]
        return "int8" if self.weights == "int4" and param in ("embedding", "head") else self.weights

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """The factor of q.k in the softmax: 1 / sqrt(head_dim), unless the model has its own."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that get rotary embedding."""
        return self.rotary_dim or self.head_dim

    @property
    def dense_mlp(self) -> bool:
        """Whether what :meth:`layer` gives has an MLP that every token goes through."""
        return self.experts is None or self.experts.shared_inner > 0

    @property
    def mlp_channels(self) -> int:
        """Channels of MLPs that a token goes through in a layer, at most."""
        if self.experts is None:
            return self.intermediate_size
        chosen = self.experts.active * self.experts.inner + self.experts.shared_inner
        return max(chosen, self.intermediate_size) if self.experts.dense_layers else chosen

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp in ("gated_silu", "gated_gelu")

    def identity(self) -> dict[str, Any]:
        """The fields by which saved conversations know a model.

        A field that was added after version 0.1 is left out where it holds its default, so that a model has the
        identity that it was saved with.
        """
        known = dataclasses.asdict(self)
        if self.experts is not None:
            known["experts"] = _used(self.experts, known["experts"])
        return _used(self, known)


def _used(described: Any, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, without those that were added later and hold their defaults."""
    fields = dataclasses.fields(described)
    unused = {f.name for f in fields if f.metadata.get("added") and getattr(described, f.name) == f.default}
    unused |= {f.name for f in fields if not f.metadata.get("identity", True)}
    return {name: value for name, value in known.items() if name not in unused}
