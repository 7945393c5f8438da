"""Record which tokens NVIDIA's kvpress keeps (Apache 2.0), for the tests of the policies that it has too.

Needs kvpress 0.5.5 and its torch and transformers (below 5.3); nobody needs it to install, run or test kvjax. From the
repository:

    python scripts/golden_kvpress.py    # tests/golden/kvpress_choices.json

Of each case of ``tests/support/kvpress_cases.py`` the press runs in a transformers llama with the case's weights, and
the tokens that stay are recorded for each layer and KV head. It runs in float32 and in float64, and both must choose
alike: then no choice hangs on rounding. Of the press that changes values the first channels are recorded too.

What runs is kvpress's own code, but where a test compares the part that is common:

- "h2o": ObservedAttention divides the sums of the attention matrix's columns by the queries in them; H2O takes the
  sums, so that the division is undone.
- "compactor": the keys are not projected, and the prompt fills its chunks, so that none is padded: see
  ``kvjax.Compactor``.
- Q-Filters are not on disk; theirs are the lowest products, so that kvjax's filters are given with their sign turned.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import kvpress
import kvpress.presses.kvzip_press
import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import toys  # noqa: E402
from support import kvpress_cases as cases  # noqa: E402

REMOVED = 1 - cases.RATIO


class ColumnSums(kvpress.ObservedAttentionPress):
    """ObservedAttention without its division."""

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = super().score(*args, **kwargs)
        return scores * torch.arange(scores.shape[-1], 0, -1)


def finch() -> Any:
    """Finch by a window: the delimiter token that it asks for only says where the window begins."""
    press = kvpress.FinchPress(REMOVED)
    press.delimiter_token_id, press.window_size = -1, 16
    return press


PRESSES: dict[str, Callable[[], Any]] = {
    "streamingllm": lambda: kvpress.StreamingLLMPress(REMOVED),
    "snapkv": lambda: kvpress.SnapKVPress(REMOVED, window_size=16),
    "pyramidkv": lambda: kvpress.PyramidKVPress(REMOVED, window_size=8, beta=4),
    "tova": lambda: kvpress.TOVAPress(REMOVED),
    "h2o": lambda: ColumnSums(REMOVED),
    "keydiff": lambda: kvpress.KeyDiffPress(REMOVED),
    "expected_attention": lambda: kvpress.ExpectedAttentionPress(REMOVED),
    "expected_attention_epsilon": lambda: kvpress.ExpectedAttentionPress(REMOVED, epsilon=0.01),
    "expected_attention_mean": lambda: kvpress.ExpectedAttentionPress(REMOVED, use_covariance=False, use_vnorm=False),
    "adakv": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(REMOVED, epsilon=0.01)),
    "adakv_snapkv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(REMOVED, window_size=16), alpha_safeguard=0.5),
    "criticalkv": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(REMOVED, window_size=16)),
    "criticalkv_expected": lambda: kvpress.CriticalKVPress(kvpress.ExpectedAttentionPress(REMOVED, use_vnorm=False)),
    "chunkkv": lambda: kvpress.ChunkKVPress(kvpress.KeyDiffPress(REMOVED)),
    "chunkkv_rest": lambda: kvpress.ChunkKVPress(kvpress.KeyDiffPress(REMOVED)),
    "merged": lambda: kvpress.MergingPress(kvpress.KeyDiffPress(REMOVED)),
    "finch": finch,
    "qfilters": lambda: kvpress.QFilterPress(REMOVED),
    "compactor": lambda: kvpress.CompactorPress(REMOVED, chunk_size=32, sketch_dimension=16),
    "kvzip_layer": lambda: kvpress.KVzipPress(REMOVED, layerwise=True, chunk_size=64),
    "kvzip_model": lambda: kvpress.KVzipPress(REMOVED, chunk_size=64),
}


def replace_what_differs() -> None:
    """The replacements that the module's docstring names, and the tokenizer of the tests in the place of the hub's."""
    encode = toys.byte_tokenizer().encode
    words = types.SimpleNamespace(chat_template=None, encode=lambda text, **_: torch.tensor([encode(text)]).long())
    kvpress.presses.kvzip_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda _: words)
    filters = torch.from_numpy(cases.filters())
    kvpress.QFilterPress.load_q_filters = staticmethod(lambda _: -filters)


@contextlib.contextmanager
def unprojected() -> Iterator[None]:
    """Compactor's random projections are the identity."""
    drawn = torch.randn

    def identity(*shape: int, device: Any, dtype: Any) -> torch.Tensor:
        return torch.eye(shape[-1], dtype=dtype).expand(*shape) * math.sqrt(shape[-1])

    torch.randn = identity
    try:
        yield
    finally:
        torch.randn = drawn


def numbers(kept: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Of one head, the places in ``whole`` [T, D] of the rows that were kept."""
    found = [int((whole == row).all(dim=1).nonzero()) for row in kept]
    assert len(set(found)) == len(found)
    return found


@torch.no_grad()
def kept_tokens(
    case: cases.Case, path: pathlib.Path, dtype: torch.dtype
) -> tuple[list[list[list[int]]], list[list[list[list[float]]]]]:
    """The tokens that stay, and the first channels of their values, by layer and head."""
    torch.set_default_dtype(dtype)  # of KVzip's mask
    implementation = "eager" if case.name == "h2o" else "sdpa"  # it reads the attention matrix
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation).eval()
    ids = torch.tensor([cases.prompt(case.tokens)])
    whole, cut = DynamicCache(), DynamicCache()
    model.model(input_ids=ids, past_key_values=whole)
    press = PRESSES[case.name]()
    with press(model):
        model.model(input_ids=ids, past_key_values=cut)
    kept, values = [], []
    by = "keys" if case.name == "merged" else "values"  # by which tokens are known: Finch's keys are rotated
    for number, layer in enumerate(model.model.layers):
        every, some = (getattr(cache.layers[number], by)[0] for cache in (whole, cut))
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if masked is None:
            found = [numbers(*head) for head in zip(some, every, strict=True)]
            kept.append([sorted(head) for head in found])
            held = zip(found, cut.layers[number].values[0], strict=True)
            values.append([v[np.argsort(head), : cases.CHANNELS].tolist() for head, v in held])
            continue
        here = torch.ones(every.shape[:2], dtype=torch.bool)
        here[masked[1], masked[2]] = False
        kept.append([head.nonzero()[:, 0].tolist() for head in here])
    return kept, values


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = cases.folder(pathlib.Path(name))
        replace_what_differs()
        for case in cases.CASES:
            with unprojected() if case.name == "compactor" else contextlib.nullcontext():
                both = [kept_tokens(case, folder, dtype) for dtype in (torch.float32, torch.float64)]
            (kept, _), (exact, values) = both
            assert kept == exact, f"{case.name}: rounding decides; draw another prompt"
            found[case.name] = kept
            print(case.name, [[len(head) for head in layer] for layer in kept], flush=True)
            if case.name == "merged":
                found["merged_values"] = np.round(values, 5).tolist()
    cases.CHOICES.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
