"""Families of models: how a configuration becomes a ``ModelConfig`` and which weight fills which part of a parameter.

A family is a file of this package and a line of ``FAMILIES``, or, elsewhere, a :class:`Family` given to
:func:`register`. It maps a Hugging Face ``config.json`` and GGUF metadata to a configuration, and names every tensor of
a checkpoint with the part of a parameter that it fills, mostly by a :class:`Layout`. The loaders know no family by
name.
"""

from __future__ import annotations

from typing import Any

from kvjax.checkpoints.families.baichuan import BAICHUAN
from kvjax.checkpoints.families.bloom import BLOOM
from kvjax.checkpoints.families.cohere import COHERE, COHERE2
from kvjax.checkpoints.families.experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from kvjax.checkpoints.families.falcon import FALCON
from kvjax.checkpoints.families.family import Family, Place, Weight, input_last, output_first, transposed, unchanged
from kvjax.checkpoints.families.gemma import GEMMA
from kvjax.checkpoints.families.gemma3 import GEMMA2, GEMMA3, GEMMA3_TEXT
from kvjax.checkpoints.families.glm import CHATGLM, GLM, GLM4
from kvjax.checkpoints.families.gpt_neox import GPT_NEOX
from kvjax.checkpoints.families.gpt_oss import GPT_OSS
from kvjax.checkpoints.families.granite import GRANITE
from kvjax.checkpoints.families.llama import LLAMA
from kvjax.checkpoints.families.mistral import MINISTRAL, MISTRAL
from kvjax.checkpoints.families.mpt import MPT
from kvjax.checkpoints.families.olmo2 import OLMO2, OLMO3
from kvjax.checkpoints.families.phi import PHI
from kvjax.checkpoints.families.phi3 import PHI3
from kvjax.checkpoints.families.qwen2 import QWEN2
from kvjax.checkpoints.families.qwen3 import QWEN3
from kvjax.checkpoints.families.refused import REFUSED
from kvjax.checkpoints.families.smollm3 import SMOLLM3
from kvjax.checkpoints.families.stablelm import STABLELM
from kvjax.checkpoints.families.starcoder2 import STARCODER2
from kvjax.checkpoints.families.weight_names import Layout, weights_of
from kvjax.errors import UsageError, WeightsError, quoted

__all__ = [
    "FAMILIES",
    "GGUF_NAMES",
    "Family",
    "Layout",
    "Place",
    "Weight",
    "family",
    "gguf_name",
    "input_last",
    "output_first",
    "register",
    "transposed",
    "unchanged",
    "weights_of",
]

#: Every known family, by the architecture's name in ``config.json`` (``model_type``) and in GGUF.
FAMILIES: dict[str, Family] = {
    "baichuan": BAICHUAN,
    "bloom": BLOOM,
    "chatglm": CHATGLM,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "falcon": FALCON,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3_TEXT,
    "glm": GLM,
    "glm4": GLM4,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "llama": LLAMA,
    "ministral": MINISTRAL,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "mpt": MPT,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi": PHI,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}


#: Families by llama.cpp's name of them, where that is another.
GGUF_NAMES = {
    "command-r": "cohere",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
#: Families whose GGUF files go by another family's name.
GGUF_AS = {
    "gemma3_text": "gemma3", "glm": "chatglm", "ministral": "llama", "mistral": "llama", "mixtral": "llama",
    "olmo3": "olmo2",
}  # fmt: skip


def gguf_name(name: str) -> str | None:
    """A family's name in GGUF files (``general.architecture``), or None if its GGUF files are not read."""
    if name in GGUF_AS:
        return GGUF_AS[name]
    llama_cpp = {family: other for other, family in GGUF_NAMES.items()}
    return llama_cpp.get(name, name) if FAMILIES[name].from_gguf else None


def register(name: str, family: Family) -> None:
    """Make ``kvjax.load`` read models of an architecture.

    Args:
      name: ``model_type`` of their ``config.json``, ``general.architecture`` of their GGUF files.
      family: how they are read.

    Raises:
      UsageError: another family has the name.
    """
    if FAMILIES.setdefault(name, family) is not family:
        raise UsageError(f"The architecture {quoted(name)} already has a family; choose another name.")


def family(name: Any, origin: str) -> Family:
    """The family called ``name``; WeightsError where there is none, with the reason where that is on purpose."""
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    said = f"{origin} is a model of architecture {quoted(name)}, which is not supported"
    if isinstance(name, str) and name in REFUSED:
        raise WeightsError(f"{said}: {REFUSED[name]}.")
    # No close name is offered: a checkpoint under another architecture's name would load, and answer nonsense.
    raise WeightsError(f"{said}; `kvjax models` lists those that are.")
