"""Methods by which Hugging Face checkpoints are quantised, as their ``quantization_config`` describes them.

A method is a file of this package and a function of :data:`_METHODS`. It says which stored tensors stand for a matrix,
and reads it as whole numbers, scales and zero points, or as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.checkpoints.families.settings import refuse_quantised
from kvjax.checkpoints.methods.awq import Awq
from kvjax.checkpoints.methods.compressed import Compressed
from kvjax.checkpoints.methods.fp8 import Fp8
from kvjax.checkpoints.methods.gptq import Gptq
from kvjax.checkpoints.quantised_tensor import Method
from kvjax.errors import WeightsError, quoted

#: Where descriptions are; the second is an older name.
_KEYS = ("quantization_config", "compression_config")
Described = Mapping[str, Any]


def method_of(config: Mapping[str, Any], origin: str) -> tuple[Method | None, dict[str, Any]]:
    """How a ``config.json`` says that weights are quantised, and the rest of it.

    MXFP4 stays in it: its tensors are known by their names, and gpt-oss alone has them.

    Raises:
      WeightsError: by a method, or a form of it, that cannot be read; the sentence says what to do instead.
    """
    key = next((key for key in _KEYS if config.get(key)), None)
    text = config.get("text_config")
    if key is None and isinstance(text, Mapping) and any(text.get(key) for key in _KEYS):
        found, rest = method_of(text, origin)
        return found, {**config, "text_config": rest}
    if key is None:
        return None, dict(config)
    described = config[key]
    rest = {name: value for name, value in config.items() if name not in _KEYS}
    name = described.get("quant_method") if isinstance(described, Mapping) else None
    if name == "mxfp4":
        return None, {**rest, _KEYS[0]: described}
    read = _METHODS.get(name) if isinstance(name, str) else None
    if read is None:
        refuse_quantised({_KEYS[0]: described}, origin)
    assert read is not None
    return read(described, origin), rest


def _refused(origin: str, what: str) -> WeightsError:
    return WeightsError(
        f"{origin} has weights that are quantised by {what}, which cannot be read; give the checkpoint in float "
        "that they were made from, or a GGUF of the model."
    )


def _group(value: Any, origin: str) -> int | None:
    """Inputs of a group; None for all, which files say as -1."""
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise WeightsError(f"{origin} has {quoted(value)} as its group_size; a whole number is needed, or -1.")
    return value


def _bits(described: Described, origin: str, method: str, known: tuple[int, ...], *names: str) -> int:
    bits = next((described[name] for name in names if described.get(name) is not None), None)
    if type(bits) is not int or bits not in known:
        raise _refused(origin, f"{method} to {quoted(bits)} bits")
    return bits


def _form(described: Described, *names: str) -> Any:
    """The form of packing, by the first of the names that writers have given it."""
    return next((described[name] for name in names if described.get(name)), None)


def _gptq(described: Described, origin: str) -> Method:
    bits = _bits(described, origin, "GPTQ", (4, 8), "bits")
    version = _form(described, "checkpoint_format", "format") or "gptq"
    if version not in ("gptq", "gptq_v2") or described.get("is_marlin_format"):
        raise _refused(origin, f"GPTQ in the form {quoted('marlin' if version == 'gptq' else version)}")
    rules = described.get("dynamic") or {}
    if not isinstance(rules, Mapping) or any(isinstance(rule, Mapping) and rule for rule in rules.values()):
        raise _refused(origin, "GPTQ with rules of its own for some layers")
    group = _group(described.get("group_size"), origin)
    return Gptq(bits, group, int(version == "gptq"), bool(described.get("desc_act")))


def _awq(described: Described, origin: str) -> Method:
    _bits(described, origin, "AWQ", (4,), "bits", "w_bit")
    version = _form(described, "version", "checkpoint_format", "format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused(origin, f"AWQ in the form {quoted(version)}")
    return Awq(_group(described.get("group_size", described.get("q_group_size")), origin))


def _fp8(described: Described, origin: str) -> Method:
    return Fp8(_block(described.get("weight_block_size"), origin))


def _block(value: Any, origin: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        outputs, inputs = map(int, sizes)
    except (TypeError, ValueError):
        outputs = inputs = 0
    if outputs < 1 or inputs < 1:
        raise WeightsError(f"{origin} has {quoted(value)} as the size of its blocks; two whole numbers are needed.")
    return outputs, inputs


#: The forms of compressed-tensors that are read; whether numbers are packed.
_FORMS = {"pack-quantized": True, "int-quantized": False, "naive-quantized": False, "float-quantized": False}


def _compressed(described: Described, origin: str) -> Method:
    form, groups = described.get("format"), described.get("config_groups")
    sparse = described.get("sparsity_config") or {}
    if not isinstance(form, str) or form not in _FORMS or not isinstance(groups, Mapping) or not groups:
        raise _refused(origin, f"compressed-tensors in the form {quoted(form)}")
    if not isinstance(sparse, Mapping) or sparse.get("format") not in (None, "dense"):
        raise _refused(origin, "compressed-tensors with sparse weights")
    transforms = described.get("transform_config") or {}
    # Activations would have to be transformed too, by Hadamard matrices for instance.
    if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
        raise _refused(origin, "compressed-tensors with transformed weights")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    schemes = [dict(each) for each in weights if isinstance(each, Mapping)]
    said = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure")
    if len(schemes) < len(weights) or any(a.get(name) != schemes[0].get(name) for a in schemes for name in said):
        raise _refused(origin, "compressed-tensors in several forms")
    scheme = schemes[0]
    kind, strategy, bits = scheme.get("type") or "int", scheme.get("strategy"), scheme.get("num_bits", 8)
    if kind == "float" and bits == 8 and not _FORMS[form] and strategy in ("tensor", "channel", "block"):
        return Fp8(_block(scheme.get("block_structure"), origin) if strategy == "block" else None)
    if (
        kind != "int"
        or bits not in ((4, 8) if _FORMS[form] else (8,))
        or strategy not in ("tensor", "channel", "group")
    ):
        raise _refused(origin, f"compressed-tensors to {quoted(bits)} bits of {quoted(kind)} by {quoted(strategy)}")
    group = _group(scheme.get("group_size"), origin) if strategy == "group" else None
    return Compressed(bits, group, _FORMS[form], bool(scheme.get("symmetric", True)))


_METHODS: dict[str, Callable[[Described, str], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
}
