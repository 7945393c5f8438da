"""Writes the table of ``docs/models.md``: every family with its features, its error and the formats that were loaded.

python -m tools.model_table
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from support import family_cases, family_oracle, gguf_files, tiny  # noqa: E402
from support import own_cases as own  # noqa: E402

from kvjax.checkpoints.families import FAMILIES, gguf_name  # noqa: E402
from kvjax.checkpoints.load import load  # noqa: E402
from kvjax.model.config import ModelConfig  # noqa: E402
from kvjax.runtime.prefill import logits_of  # noqa: E402
from kvjax.tables import Column, Table  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
#: What people look for, by architecture.
KNOWN_AS = {
    "baichuan": "Baichuan, Baichuan 2", "bloom": "BLOOM", "chatglm": "GLM-4-9B, first publication",
    "cohere": "Command R, R+", "cohere2": "Command R7B, Command A", "falcon": "Falcon", "gemma": "Gemma",
    "gpt_oss": "gpt-oss", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 4B to 27B, their language model", "gemma3_text": "Gemma 3 270M, 1B",
    "glm": "GLM-4-9B", "glm4": "GLM-4-0414", "gpt_neox": "GPT-NeoX, Pythia", "granite": "Granite 3",
    "llama": "Llama 2 to 3.3, SmolLM2", "ministral": "Ministral 8B", "mistral": "Mistral 0.1 to 0.3, Nemo",
    "mixtral": "Mixtral", "mpt": "MPT", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "phi": "Phi-1, 1.5, 2",
    "phi3": "Phi-3, 3.5, 4, 4-mini", "qwen2": "Qwen 1.5, 2, 2.5", "qwen2_moe": "Qwen 1.5 MoE, Qwen2 MoE",
    "qwen3": "Qwen3", "qwen3_moe": "Qwen3 MoE", "smollm3": "SmolLM3", "stablelm": "StableLM, StableLM 2",
    "starcoder2": "StarCoder2",
}  # fmt: skip
#: Fields of a configuration that a reader would not call a feature.
_SIZES = {
    "family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position", "rms_norm_eps", "rope", "tie_embeddings",
}  # fmt: skip


@dataclasses.dataclass
class Row:
    """A family's largest error, and its features beside a llama's."""

    error: float = 0.0
    features: set[str] = dataclasses.field(default_factory=set)


def features(config: ModelConfig) -> set[str]:
    """The fields that differ from a llama's, as the reader may find them in ``ModelConfig``."""
    found = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SIZES and value != field.default:
            found.add(
                f"{field.name} {value}" if isinstance(value, str) else field.name if value else f"no {field.name}"
            )
    return found


def cases() -> Iterator[tuple[str, Path, Callable[[int], np.ndarray], tuple[int, ...], Callable[[int], tuple]]]:
    """Every golden case: its architecture, its folder, prompts, lengths, and (reference logits, positions)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        golden = np.load(family_cases.GOLDEN / "families.npz")
        for case in family_cases.CASES:
            path = family_cases.write_folder(
                case, folder / case.name, family_cases.values(case, family_cases.shapes(case))
            )
            want = lambda n, case=case: (golden[f"{case.name}/{n}"], np.arange(n))  # noqa: E731
            yield case.config["model_type"], path, case.tokens, case.lengths, want
        older = np.load(family_cases.GOLDEN / "tiny_logits.npz")
        for case in tiny.CASES:
            path = tiny.write_folder(case, folder / case.name)
            want = lambda n, case=case: (older[f"{case.name}/{n}"], case.stored_positions(n))  # noqa: E731
            yield case.config["model_type"], path, case.tokens, case.lengths, want
        for case, shapes, reference in (
            (own.CHATGLM, own.chatglm_shapes(), family_oracle.chatglm),
            (own.ROTARY, own.baichuan_shapes(), family_oracle.baichuan),
            (own.ALIBI, own.baichuan_shapes(), family_oracle.baichuan),
        ):
            tensors = family_cases.values(case, shapes)
            path = family_cases.write_folder(case, folder / case.name, tensors)
            want = lambda n, case=case, tensors=tensors, reference=reference: (  # noqa: E731
                reference(case, tensors, case.tokens(n)), np.arange(n),
            )  # fmt: skip
            yield case.config["model_type"], path, case.tokens, case.lengths, want
        qwen3 = gguf_files.case("llama_gqa", model_type="qwen3", head_dim=12)
        from support.recall.oracle import forward

        path = gguf_files.write_folder(qwen3, folder / "qwen3")
        yield "qwen3", path, qwen3.tokens, (40,), lambda n: (forward(path, qwen3.tokens(n))[0], np.arange(n))


def main() -> None:
    """Measure every golden case, and write the table into the page."""
    rows: dict[str, Row] = defaultdict(Row)
    for family, path, tokens, lengths, want in cases():
        lm = load(path, dtype="float32", progress=False)
        for length in lengths:
            padded = np.zeros((1, max(64, length)), np.int32)
            padded[0, :length] = tokens(length)
            reference, positions = want(length)
            found = np.asarray(logits_of(lm.params, jnp.asarray(padded), jnp.array([length])))[0][positions]
            rows[family].error = max(rows[family].error, float(np.abs(found - reference).max() / reference.std()))
        rows[family].features |= features(lm.config)
    rows["gemma3"] = rows["gemma3_text"]  # the language model of a multimodal file, by other names of its tensors
    assert set(rows) == set(FAMILIES) == set(KNOWN_AS), set(FAMILIES) ^ set(rows)
    columns = (
        Column("architecture", lambda name: f"`{name}`"),
        Column("models", KNOWN_AS.__getitem__),
        Column("features beside a llama's", lambda name: ", ".join(f"`{x}`" for x in sorted(rows[name].features))),
        Column("error", lambda name: f"{rows[name].error:.0e}"),
        Column("GGUF", lambda name: "yes" if gguf_name(name) else ""),
    )
    table = Table(columns, sorted(rows)).markdown()
    before, rest = PAGE.read_text().split("<!-- table -->")
    PAGE.write_text(f"{before}<!-- table -->\n{table}\n<!-- end -->{rest.split('<!-- end -->')[1]}")


if __name__ == "__main__":
    main()
