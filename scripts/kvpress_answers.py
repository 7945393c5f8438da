"""Ask NVIDIA's kvpress the needle questions of ``peer_answers.py``: the same token ids, weights and answers' lengths.

Needs kvpress 0.5.5 with its torch and transformers (below 5.3) beside kvjax; nobody needs it to install, run or test
kvjax. How to run it: see ``peer_answers.py``.

What runs is kvpress's own: its presses, and the greedy decoding of its pipeline. Their files on the Hugging Face hub
are not needed: Q-Filters get kvjax's filters with their sign turned (kvpress keeps the lowest products), and KVzip gets
kvjax's tokenizer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import kvpress
import kvpress.presses.kvzip_press
import numpy as np
import torch
from peer_answers import METHODS, Journal, arguments, prompts
from transformers import DynamicCache

import kvjax
from kvjax.bench.transformers_peer import build
from kvjax.eval.suites.prompts import Prepared
from kvjax.policies import QFilters
from kvjax.policies.profile import FilterProfile
from kvjax.policies.profile_files import profile_of

REMOVED = 0.75
#: The press that is the like of kvjax's policy, with kvpress's default options but for the inner press; an inner
#: ExpectedAttention has the ``epsilon`` of kvpress's registry, which is kvjax's default.
PRESSES: dict[str, Callable[[], Any]] = {
    "streamingllm": lambda: kvpress.StreamingLLMPress(REMOVED),
    "snapkv": lambda: kvpress.SnapKVPress(REMOVED),
    "pyramidkv": lambda: kvpress.PyramidKVPress(REMOVED),
    "tova": lambda: kvpress.TOVAPress(REMOVED),
    "h2o": lambda: kvpress.ObservedAttentionPress(REMOVED),
    "finch": lambda: _finch(window=32),
    "keydiff": lambda: kvpress.KeyDiffPress(REMOVED),
    "lagkv": lambda: kvpress.LagKVPress(REMOVED),
    "qfilters": lambda: kvpress.QFilterPress(REMOVED),
    "expected_attention": lambda: kvpress.ExpectedAttentionPress(REMOVED, epsilon=1e-2),
    "adaptive": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(REMOVED, epsilon=1e-2)),
    "chunkkv": lambda: kvpress.ChunkKVPress(kvpress.KeyDiffPress(REMOVED)),
    "compactor": lambda: kvpress.CompactorPress(REMOVED),
    "criticalkv": lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(REMOVED)),
    "merged": lambda: kvpress.MergingPress(kvpress.KeyDiffPress(REMOVED)),
    "adaptive:inner=kvzip": lambda: kvpress.KVzipPress(REMOVED, layerwise=True),
    "adaptive:inner=kvzip,scope=model": lambda: kvpress.KVzipPress(REMOVED),
}

assert tuple(PRESSES) == METHODS


def _finch(window: int) -> Any:
    """Finch by a window: what it asks of a delimiter token is only where the window begins."""
    press = kvpress.FinchPress(REMOVED)
    press.delimiter_token_id, press.window_size = -1, window
    return press


class Press(kvpress.KVPressTextGenerationPipeline):
    """kvpress's pipeline, given token ids instead of text.

    Presses change what a layer's attention leaves in the cache, not what the prompt's other layers read. So a prompt
    goes through the model once, and each press has its hooks called with what the layers got and made.
    ObservedAttention, which reads attention matrices, has a pass of its own.
    """

    def __init__(self, lm: Any, threads: int):
        self.model = build(lm.params, lm.config)
        torch.set_num_threads(threads)
        self.model.generation_config.eos_token_id = list(lm.stop_token_ids)
        self.tokenizer = types.SimpleNamespace(
            decode=lambda ids, skip_special_tokens: lm.tokenizer.decode(ids.tolist(), skip_special_tokens)
        )
        self._forward_model = self.model.model.forward
        self._read: tuple[int, ...] | None = None
        self._layers: list[tuple[dict[str, Any], Any, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def answer(self, press: Any, one: Prepared) -> str:
        observed = isinstance(press, kvpress.ObservedAttentionPress)
        self.model.set_attn_implementation("eager" if observed else "sdpa")
        if not observed and self._read != tuple(one.context):
            self._record(one.context)
        self.model.model.forward = self._forward_model if observed else self._replay
        torch.manual_seed(0)  # Compactor draws a projection
        given = {"context_ids": torch.tensor([one.context]), "questions_ids": [torch.tensor([one.question])]}
        return self._forward(given, max_new_tokens=one.item.max_new_tokens, press=press)[0]

    def _record(self, context: Sequence[int]) -> None:
        """Read a context with the whole cache."""
        self._layers, cache = [], DynamicCache()
        modules = [layer.self_attn for layer in self.model.model.layers]

        def hook(module: Any, _: Any, given: dict[str, Any], made: Any) -> None:
            held = cache.layers[module.layer_idx]
            self._layers.append((given, made, held.keys, held.values))

        hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
        self._forward_model(input_ids=torch.tensor([context]), past_key_values=cache)
        for one in hooks:
            one.remove()
        self._read = tuple(context)

    def _replay(self, **given: Any) -> Any:
        """The model's forward pass, but a context's is the recorded one."""
        cache = given["past_key_values"]
        if cache.get_seq_length() > 0:
            return self._forward_model(**given)
        assert tuple(given["input_ids"][0].tolist()) == self._read
        for layer, (seen, made, k, v) in zip(self.model.model.layers, self._layers, strict=True):
            layer.self_attn.masked_key_indices = None  # as kvpress's own attention does in a prefill
            cache.update(k.clone(), v.clone(), layer.self_attn.layer_idx)
            for hook in layer.self_attn._forward_hooks.values():
                hook(layer.self_attn, (), {**seen, "past_key_values": cache}, made)
        return None

    def generate_answer(self, question_ids: torch.Tensor, cache: Any, context_length: int, max_new_tokens: int) -> str:
        """kvpress's; where layers hold unequally many tokens, for which transformers makes no mask, token by token."""
        *first, last = question_ids.split(1, dim=1)
        if len({cache.get_seq_length(layer) for layer in range(len(cache))}) == 1:
            first, last = [], question_ids
        for number, token in enumerate(first):
            self.model(input_ids=token, past_key_values=cache, position_ids=torch.tensor([[context_length + number]]))
        return super().generate_answer(last, cache, context_length + len(first), max_new_tokens)


def _tokenizer_for_kvzip(lm: Any) -> Any:
    """What KVzip's press asks of a tokenizer from the hub, answered by the model's own."""
    return types.SimpleNamespace(
        chat_template=lm.tokenizer.has_chat_template or None,
        apply_chat_template=lambda messages, **_: lm.tokenizer.render(messages),
        encode=lambda text, **_: torch.tensor([lm.tokenizer.encode(text)]),
    )


def _without_hub(lm: Any) -> None:
    """Let the presses that read files of the hub have kvjax's in their place."""
    words = _tokenizer_for_kvzip(lm)
    kvpress.presses.kvzip_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda _: words)
    try:
        profile = profile_of(QFilters(), FilterProfile, lm.config)
    except kvjax.KvjaxError:
        return
    filters = torch.from_numpy(
        np.asarray(profile.filters, np.float32).reshape(lm.config.num_layers, -1, lm.config.head_dim)
    )
    kvpress.QFilterPress.load_q_filters = staticmethod(lambda _: -filters)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    lm = kvjax.load(options.model, dtype="float32")
    asker, journal = Press(lm, options.threads), Journal(options.answers, "kvpress")
    _without_hub(lm)
    for one in prompts(lm, options):
        for method in options.methods.split(";"):
            if journal.missing(method, [one]):
                journal.add(method, one, asker.answer(PRESSES[method](), one))


if __name__ == "__main__":
    main()
