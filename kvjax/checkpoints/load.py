"""``load``: a language model from a name, a file, a folder or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from kvjax.checkpoints.converted import TEMPLATE, TOKENIZER, check_files, damaged, is_converted, read_description
from kvjax.checkpoints.converted_weights import read_weights
from kvjax.checkpoints.families import GGUF_NAMES, Family, family
from kvjax.checkpoints.families.settings import check_switches
from kvjax.checkpoints.fill import default_dtype, fill
from kvjax.checkpoints.gguf import GGUFFile
from kvjax.checkpoints.gguf_parts import GGUFParts, open_gguf
from kvjax.checkpoints.group_filling import kept_formats
from kvjax.checkpoints.hub import fetch
from kvjax.checkpoints.methods import method_of
from kvjax.checkpoints.quantised_tensor import Method
from kvjax.checkpoints.safetensors import SafetensorsFolder, holds_weights, read_json
from kvjax.checkpoints.tensor_names import by_parameter
from kvjax.checks import float_dtype
from kvjax.compile_cache import keep_compiled_programs
from kvjax.environment import switched
from kvjax.errors import UsageError, WeightsError, cut, kind_of, quoted, say_once
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.model.quantised import Weights as Weights
from kvjax.model.quantised import check_weights
from kvjax.progress import Progress, showing, stage
from kvjax.sharding.mesh import Mesh, parse_mesh
from kvjax.text.gguf_tokenizer import stop_ids_from_gguf, tokenizer_from_gguf
from kvjax.text.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_json
from pallas_kernels.cpu import library

_ROPE_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model ready to generate.

    Attributes:
      name: what it was loaded as.
      config: its shape.
      params: its parameters, a pytree.
      tokenizer: its tokenizer.
      stop_token_ids: ids that end an answer, from its generation configuration.
      mesh: the devices it is spread over; None for one device.
    """

    name: str
    config: ModelConfig
    params: Decoder = dataclasses.field(repr=False)
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    mesh: Mesh | None = None

    def on(self, mesh: Mesh | str) -> LanguageModel:
        """A model that is on one device, spread over a mesh; :func:`load` puts it there without the detour."""
        from kvjax.sharding.placement import place_weights

        wanted = parse_mesh(mesh)
        if wanted is None or self.mesh is not None:
            raise UsageError("Give a mesh, and a model that is on one device; kvjax.load takes mesh= as well.")
        return dataclasses.replace(self, params=place_weights(self.params, wanted), mesh=wanted)


def check_model(lm: Any) -> None:
    """Refuse (UsageError) what is no model."""
    if not isinstance(lm, LanguageModel):
        raise UsageError(f"The model is {kind_of(lm)}; give one from kvjax.load.")


def load(
    name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    weights: Weights | None = None,
    mesh: Mesh | str | None = None,
    compile_cache: bool = True,
    progress: Progress = None,
) -> LanguageModel:
    """Load a model's weights and tokenizer.

    Args:
      name: "smollm2-135m-instruct" (downloaded once into the user's cache folder, KVJAX_CACHE to choose another), a
        path to a .gguf file, or to one part of a split one, a folder in Hugging Face's form (config.json, safetensors,
        tokenizer) or with one GGUF in it, one that :func:`kvjax.convert` wrote, a hub id ("org/name"), or a GGUF of one
        ("org/name:file.gguf").
      dtype: "float32", "bfloat16" or "float16" for every parameter; by default bfloat16 on accelerators, and float32
        on the CPU and on GPUs before Ampere, which do not multiply bfloat16. Numbers of a model that was trained in
        bfloat16 may be too large for float16.
      weights: "int8" stores every matrix as int8 numbers with a float32 scale for each of its outputs (rows of the
        embedding, columns of a projection, of every expert's), rounded as it is read: a quarter of float32's bytes, a
        half of bfloat16's. Norms, biases, the router of experts, activations and the cache stay ``dtype``. CPUs and
        TPUs round the activations of each token too, and multiply integers. "int4" stores 4 bits a number, two in a
        byte, with a bfloat16 scale for each group of 128 inputs of an output (64 or 32 where 128 do not divide them),
        and the embedding and the head as int8: an eighth of float32's bytes. "fp8" stores matrices as float8_e4m3fn,
        with scales as of int8; they become floats as they are multiplied, on CPUs slowly. "file" keeps the numbers of a
        quantised checkpoint with its own scales and minima: of GGUF Q8_0 and the formats of 4, 5 and 6 bits, of Hugging
        Face's GPTQ, AWQ and compressed-tensors of 4 and 8 bits, MXFP4 and fp8; what is quantised otherwise is int8, and
        floats are ``dtype``. By default everything is ``dtype``.
      mesh: devices to spread over, a :class:`kvjax.Mesh` or its text form ("data=4,model=2"): weights over the model
        axis, each shard read and put straight on its devices; what the axis does not divide is on all of them. Calls
        with this model then run on the mesh. By default everything goes to JAX's default device.
      compile_cache: keep what JAX compiles in this process from here on, so that the next one starts fast; see
        :func:`kvjax.compile_cache.keep_compiled_programs`. ``KVJAX_COMPILE_CACHE=0`` switches it off.
      progress: where downloading and loading are shown: None on a terminal's standard error and in a notebook, True
        also in a log, False nowhere; a function is called with each :class:`kvjax.progress.Event`.

    Raises:
      UsageError: an unknown name, a path that does not exist, an unsupported dtype or kind of weights.
      WeightsError: a file that is missing, truncated, corrupt, or does not hold exactly the model's weights; a
        download that failed; an architecture that is not supported.
    """
    form = _Form(weights_dtype(dtype), check_weights(weights), parse_mesh(mesh))
    if form.mesh is not None:
        _ = form.mesh.jax  # too few devices are said before anything is read
    text = _text(name)
    if compile_cache:
        keep_compiled_programs()
    native = switched("KVJAX_NATIVE", True)
    with showing(progress):
        path = _found(text)
        if native:
            library.ahead("prefill", *_needed_products(form, is_converted(path)), "attention")
        with stage("load", text, unit="bytes"):
            if not path.is_dir():
                return _load_gguf(text, path, form)
            return (_load_converted if is_converted(path) else _load_folder)(text, path, form)


def _needed_products(form: _Form, converted: bool) -> tuple[str, ...]:
    """The C++ libraries of products, as far as they are known before weights are read.

    A converted folder may hold int8 weights, whatever was asked for.
    """
    floats = ("float_products",) if form.weights is None and np.dtype(form.dtype) == np.float32 else ()
    if converted or form.weights in ("int4", "file"):
        return *floats, "products", "group_products"
    return ("products",) if form.weights == "int8" else floats


def load_config(name: str | os.PathLike[str], *, progress: Progress = None) -> ModelConfig:
    """A model's configuration, for plans; names and errors as of :func:`load`.

    Of a hub id nothing but its ``config.json`` is downloaded; a GGUF of the hub is fetched whole.
    """
    text = _text(name)
    with showing(progress):
        path = _found(text, config_only=True)
    if path.is_dir():
        return read_description(path).config if is_converted(path) else _kept_by_folder(path)
    file = open_gguf(path)
    try:
        return _with_kept(*_gguf_config(file), file)
    finally:
        file.close()


def _found(name: str, config_only: bool = False) -> Path:
    """The GGUF, or the folder of a ``config.json``, that a name means."""
    path = fetch(name, config_only=config_only)
    if path.suffix == ".safetensors" and not path.is_dir():
        raise UsageError(f"{path} is a single file of weights; give the folder with its config.json: {path.parent}.")
    return path


def _text(name: str | os.PathLike[str]) -> str:
    """A name as text; UsageError for what is neither text nor a path."""
    try:
        return os.fsdecode(name)
    except TypeError as error:
        raise UsageError(f"A model is called by a name or a path; {kind_of(name)} was given.") from error


def weights_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """The dtype asked for, or the device's own for None; UsageError for one that weights cannot have."""
    return default_dtype() if dtype is None else float_dtype(dtype)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The form in which parameters are wanted."""

    dtype: DTypeLike
    weights: Weights | None
    mesh: Mesh | None


def _load_gguf(name: str, path: Path, form: _Form) -> LanguageModel:
    file = open_gguf(path)
    try:
        metadata, origin = file.metadata, file.origin
        config, kind = _gguf_config(file)
        if form.weights == "file":
            config = _with_kept(config, kind, file)
        config = config.stored_as(form.weights)
        tokenizer = tokenizer_from_gguf(metadata, origin)
        _check_vocabulary(tokenizer, config, origin)
        weights = kind.gguf_weights(config, file.shapes)
        params = fill(config, weights, file, gguf=True, dtype=form.dtype, mesh=form.mesh)
    finally:
        file.close()
    stops = tuple(index for index in stop_ids_from_gguf(metadata) if index < config.vocab_size)
    return LanguageModel(name, config, params, tokenizer, stops, form.mesh)


def _gguf_config(file: GGUFFile | GGUFParts) -> tuple[ModelConfig, Family]:
    metadata, shapes, origin = file.metadata, file.shapes, file.origin
    named = metadata.get("general.architecture")
    kind = family(GGUF_NAMES.get(named, named) if isinstance(named, str) else named, origin)
    from_gguf = kind.from_gguf
    if from_gguf is None:
        raise WeightsError(f"{origin} holds a {metadata['general.architecture']} model; load it from safetensors.")
    factors = {
        key: tuple(file.read(f"{key}.weight", 0, shapes[f"{key}.weight"][0]).tolist())
        for key in _ROPE_FACTORS
        if len(shapes.get(f"{key}.weight", ())) == 1
    }
    config = _configured(lambda: from_gguf(metadata, shapes, factors, origin), origin)
    _check_counts(config, shapes, origin)
    return config, kind


def _with_kept(config: ModelConfig, kind: Family, file: GGUFFile | GGUFParts) -> ModelConfig:
    """The configuration with the forms of the file's own numbers."""
    weights = by_parameter(kind.gguf_weights(config, file.shapes), True)
    return dataclasses.replace(config, kept=kept_formats(config, weights, file))


@dataclasses.dataclass(frozen=True)
class _Described:
    """The content of a folder's ``config.json``: the model, its family, how weights are quantised, and all of it."""

    config: ModelConfig
    kind: Family
    method: Method | None
    raw: dict[str, object]


def _described(folder: Path) -> _Described:
    origin = str(folder / "config.json")
    raw = read_json(folder / "config.json")
    kind = family(raw.get("model_type"), origin)
    method, rest = method_of(raw, origin)
    for settings in (rest, rest.get("text_config")):
        if isinstance(settings, Mapping):
            check_switches(settings, origin)
    return _Described(_configured(lambda: kind.from_hf(rest, origin), origin), kind, method, raw)


def _kept_by_folder(folder: Path) -> ModelConfig:
    """The configuration, with the forms of a quantised folder's own numbers where its weights are there."""
    found = _described(folder)
    # Of MXFP4, which has no method, the configuration keeps the description.
    quantised = found.method is not None or bool(found.raw.get("quantization_config"))
    if not quantised or not holds_weights(folder):
        return found.config
    return _with_folders_kept(found, SafetensorsFolder(folder, found.method))


def _with_folders_kept(found: _Described, checkpoint: SafetensorsFolder) -> ModelConfig:
    _check_counts(found.config, checkpoint.shapes, checkpoint.origin)
    weights = by_parameter(found.kind.hf_weights(found.config, checkpoint.shapes), False)
    return dataclasses.replace(found.config, kept=kept_formats(found.config, weights, checkpoint))


def _load_folder(name: str, folder: Path, form: _Form) -> LanguageModel:
    found = _described(folder)
    config = found.config
    tokenizer = tokenizer_from_folder(folder)
    _check_vocabulary(tokenizer, config, str(folder))
    checkpoint = SafetensorsFolder(folder, found.method)
    _check_counts(config, checkpoint.shapes, str(folder))
    weights = found.kind.hf_weights(config, checkpoint.shapes)
    if form.weights == "file":
        config = _with_folders_kept(found, checkpoint)
    config = config.stored_as(form.weights)
    params = fill(config, weights, checkpoint, gguf=False, dtype=form.dtype, mesh=form.mesh)
    stop = _stop_ids(folder, found.raw, tokenizer, config.vocab_size)
    return LanguageModel(name, config, params, tokenizer, stop, form.mesh)


def _load_converted(name: str, folder: Path, form: _Form) -> LanguageModel:
    description = read_description(folder)
    config = description.config
    if form.weights not in (None, config.weights):
        held = "float" if config.weights is None else config.weights
        raise UsageError(
            f"{folder} was converted with {held} weights; load it without weights={form.weights!r}, or convert the "
            "original again."
        )
    _check_counts(config, description.shapes, str(folder))
    check_files(folder, description)
    template = folder / TEMPLATE if TEMPLATE in description.files else None
    try:
        text = (folder / TOKENIZER).read_text(encoding="utf-8")
        chat = None if template is None else template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(folder, "its tokenizer cannot be read") from error
    tokenizer = tokenizer_from_json(text, str(folder), chat_template=chat, special_tokens=description.special_tokens)
    _check_vocabulary(tokenizer, config, str(folder))
    params = read_weights(folder, description, form.dtype, form.mesh)
    return LanguageModel(name, config, params, tokenizer, description.stop_token_ids, form.mesh)


def _configured(make: Callable[[], ModelConfig], origin: str) -> ModelConfig:
    """Settings come from a file: one of a wrong kind is the file's fault, in one sentence."""
    try:
        return make()
    except UsageError as error:
        raise WeightsError(f"{origin} describes a model that cannot be: {error}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise WeightsError(f"{origin} is corrupt: a setting is of the wrong kind ({error}).") from error


def _check_counts(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], origin: str) -> None:
    """Corrupt counts of layers and heads are said before lists of all their weights and channels fill the memory."""
    if config.num_layers > len(shapes):
        raise WeightsError(
            f"{origin} is corrupt: it says that the model has {config.num_layers:,} layers and holds {len(shapes):,} "
            "weights."
        )
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    if config.num_heads * config.head_dim > widest:
        raise WeightsError(
            f"{origin} is corrupt: it says that the model has {config.num_heads:,} heads of {config.head_dim:,} "
            f"channels, and its widest weight has {widest:,}."
        )


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, origin: str) -> None:
    """Leave out added tokens that the model does not embed, and say so; refuse a tokenizer of another model."""
    if tokenizer.vocab_size <= config.vocab_size:
        return
    if tokenizer.words_end > config.vocab_size:
        raise WeightsError(
            f"The tokenizer of {origin} has {tokenizer.words_end} tokens and the model embeds {config.vocab_size}: "
            "it belongs to another model."
        )
    beyond = tokenizer.embed_only(config.vocab_size)
    more = f" and {len(beyond) - 1:,} more tokens" if len(beyond) > 1 else ""
    say_once(
        f"The tokenizer of {cut(origin)} has {quoted(beyond[0])}{more} beyond the {config.vocab_size:,} ids that the "
        "model embeds; they are never drawn, and a text that holds one is refused."
    )


def _stop_ids(folder: Path, config: dict[str, object], tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """generation_config.json's end-of-text ids, else config.json's, else the tokenizer's end-of-text token.

    Ids that the model cannot generate (some files say -1 for none) end nothing.
    """
    path = folder / "generation_config.json"
    for source in (read_json(path) if path.is_file() else {}, config):
        found = source.get("eos_token_id")
        listed = found if isinstance(found, list) else [found]
        ids = [index for index in listed if type(index) is int and 0 <= index < vocabulary]
        if ids:
            return tuple(ids)
    eos = tokenizer.special_tokens.get("eos_token")
    try:
        return tuple(tokenizer.encode(eos)) if eos else ()
    except UsageError:  # the model does not embed it, and so never ends with it
        return ()
