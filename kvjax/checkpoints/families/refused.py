"""Architectures that kvjax does not read on purpose, each with the reason."""

from __future__ import annotations

_LATENT = (
    "its multi-head latent attention caches one vector a token for all heads together, and kvjax compresses keys and "
    "values head by head"
)
_CHUNKED = (
    "most of its layers attend within chunks of the context (chunked attention), and kvjax has global layers and "
    "sliding windows alone"
)

#: Reasons by the architecture's name in ``config.json`` (``model_type``) and in GGUF (``general.architecture``): MLA of
#: arXiv 2405.04434 and the models that took it over, and Llama 4.
REFUSED = {
    "deepseek2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "kimi_k2": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
}
