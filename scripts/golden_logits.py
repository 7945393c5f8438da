"""Ask the reference implementation (torch, transformers) for the golden values the tests compare kvjax with.

Needs torch, transformers, gguf and tokenizers; nobody needs it to install, run or test kvjax. From the repository:

    python scripts/golden_logits.py tiny                  # tests/golden/tiny_logits.npz
    python scripts/golden_logits.py smollm2 MODEL.gguf    # tests/golden/smollm2.json and smollm2_logits.npz

``tiny_logits.npz``: for every case of ``tests/support/tiny.py`` and every length, ``"<case>/<length>"`` holds the
float32 logits [positions, vocab] at ``case.stored_positions(length)`` of one forward pass over the prompt alone.

``smollm2.json``: ``strings`` (text, ids), ``conversations`` (messages, rendered text and ids with the generation
prompt, rendered text without it), ``prompts`` (name, text, ids, greedy continuation of 32 ids; ``margins``: how far
the best logit of each greedy step leads the second, in standard deviations of that step's logits).

``smollm2_logits.npz``: ``vocab_subset`` [256] token ids, and for every prompt ``<name>/positions`` [P],
``<name>/logits`` [P, 256] float32, ``<name>/mean``, ``<name>/std`` and ``<name>/argmax`` [P] of the full rows.

The token ids are those of a byte-level BPE built here from the GGUF's tables with SmolLM2's published pre-tokenizer
(single digits, then byte level). With ``--check-llama-cpp`` they are compared with llama.cpp's (package xllamacpp).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import urllib.request
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import golden_texts  # noqa: E402
from support import tiny  # noqa: E402

OUT = ROOT / "tests" / "golden"
NEW_TOKENS = 32
SUBSET = 256
POSITIONS = 24


def reference(folder: pathlib.Path, **options: Any) -> torch.nn.Module:
    """The reference model in float32 with the plain attention, ready to be asked."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: list[int] | np.ndarray) -> np.ndarray:
    """Float32 logits [T, V] of one prompt."""
    return model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].float().numpy()


def make_tiny() -> None:
    """Write ``tiny_logits.npz``."""
    golden = {}
    for case in tiny.CASES:
        with tempfile.TemporaryDirectory() as folder:
            tiny.write_folder(case, pathlib.Path(folder))
            for length in case.lengths:
                # A fresh model every time: the dynamic scaling remembers the longest prompt it has seen.
                rows = logits_of(reference(pathlib.Path(folder)), case.tokens(length))
                golden[f"{case.name}/{length}"] = rows[case.stored_positions(length)]
    np.savez_compressed(OUT / "tiny_logits.npz", **golden)


def read_tokenizer(path: pathlib.Path) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer out of the GGUF's tables."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(path).fields
    tokens, merges, types, pre, template = (
        fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.merges", "ggml.token_type", "ggml.pre", "chat_template")
    )
    if pre != "smollm":
        sys.exit(f"{path}: the pre-tokenizer is {pre!r}, not SmolLM2's")
    bpe = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of the text, nothing added."""
    return tokenizer.encode(text, add_special_tokens=False)


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], list[float]]:
    """The greedy continuation, without stopping at any token, and each step's lead in standard deviations."""
    out, margins, cache = [], [], None
    step = torch.tensor(ids)[None]
    for _ in range(NEW_TOKENS):
        answer = model(step, past_key_values=cache, use_cache=True)
        row, cache = answer.logits[0, -1].double(), answer.past_key_values
        best = row.topk(2).values
        margins.append(round(float((best[0] - best[1]) / row.std()), 6))
        out.append(int(row.argmax()))
        step = torch.tensor([[out[-1]]])
    return out, margins


def make_smollm2(path: pathlib.Path, check: bool) -> None:
    """Write ``smollm2.json`` and ``smollm2_logits.npz``."""
    tokenizer = read_tokenizer(path)

    def render(messages: list[dict[str, str]], prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    record: dict[str, list[dict[str, Any]]] = {
        "strings": [{"text": text, "ids": encode(tokenizer, text)} for text in golden_texts.STRINGS],
        "conversations": [
            {"messages": m, "text": render(m), "ids": encode(tokenizer, render(m)), "closed": render(m, False)}
            for m in golden_texts.CONVERSATIONS
        ],
        "prompts": [],
    }
    model = reference(path.parent, gguf_file=path.name)
    arrays = {"vocab_subset": np.sort(np.random.RandomState(0).permutation(model.config.vocab_size)[:SUBSET])}
    for name, text in golden_texts.prompts(render).items():
        ids = encode(tokenizer, text)
        rows = logits_of(model, ids)
        positions = np.unique(np.linspace(0, len(ids) - 1, POSITIONS).round().astype(int))
        rows = rows[positions]
        arrays[f"{name}/positions"], arrays[f"{name}/argmax"] = positions, rows.argmax(-1)
        arrays[f"{name}/mean"], arrays[f"{name}/std"] = rows.mean(-1), rows.std(-1)
        arrays[f"{name}/logits"] = rows[:, arrays["vocab_subset"]]
        continuation, margins = greedy(model, ids)
        print(f"{name}: {len(ids)} tokens, smallest lead {min(margins)}\n  {tokenizer.decode(continuation)!r}")
        record["prompts"].append({"name": name, "text": text, "ids": ids, "greedy": continuation, "margins": margins})
    if check:
        compare_with_llama_cpp(path, [*record["strings"], *record["conversations"], *record["prompts"]])
    lines = [f'"{key}": [\n' + ",\n".join(map(json.dumps, items)) + "\n]" for key, items in record.items()]
    (OUT / "smollm2.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(OUT / "smollm2_logits.npz", **arrays)


def compare_with_llama_cpp(path: pathlib.Path, items: list[dict[str, Any]]) -> None:
    """Print every text whose ids differ from llama.cpp's."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.warmup = str(path), 256, False
    server = xllamacpp.Server(options)
    differing = 0
    for item in items:
        body = json.dumps({"content": item["text"], "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", data=body, headers={"Content-Type": "application/json"}
        )
        theirs = json.loads(urllib.request.urlopen(request).read())["tokens"]
        if theirs != item["ids"]:
            differing += 1
            print(f"differs from llama.cpp: {item['text']!r}\n  here {item['ids']}\n  them {theirs}")
    print(f"{len(items) - differing} of {len(items)} texts have llama.cpp's ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiny", "smollm2"))
    parser.add_argument("model", nargs="?", type=pathlib.Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--check-llama-cpp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "tiny":
        make_tiny()
    elif options.model is None:
        parser.error("smollm2 needs the path of the GGUF file")
    else:
        make_smollm2(options.model, options.check_llama_cpp)


if __name__ == "__main__":
    main()
