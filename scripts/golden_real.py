"""Ask the reference implementation (torch, transformers) how real models continue texts.

Needs torch, transformers and gguf; nobody needs it to install, run or test kvjax. From the repository, with the GGUF
files of Qwen2.5-Coder-0.5B-Instruct and Gemma-3-270M (Q4_K_M) in a folder:

    python scripts/golden_real.py FOLDER    # tests/golden/real.json

Of each model: ``file``, and ``texts`` with their ``ids``, the greedy continuation of 24 ids in float32 (``greedy``) and
the least lead of a best logit over the second, in standard deviations of that step's logits (``margin``).
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "golden" / "real.json"
FILES = {"qwen2": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "gemma3": "gemma3-270m-q4_k_m.gguf"}
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small village by the sea. " * 60 + "In that village",
)
NEW_TOKENS = 24


@torch.no_grad()
def continued(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """The greedy continuation, and the least lead."""
    out, least, cache, step = [], float("inf"), None, torch.tensor(ids)[None]
    for _ in range(NEW_TOKENS):
        answer = model(step, past_key_values=cache, use_cache=True)
        row, cache = answer.logits[0, -1].double(), answer.past_key_values
        best = row.topk(2).values
        least = min(least, float((best[0] - best[1]) / row.std()))
        out.append(int(row.argmax()))
        step = torch.tensor([[out[-1]]])
    return out, round(least, 6)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, file in FILES.items():
        where = {"gguf_file": file, "dtype": torch.float32}
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **where).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        texts = []
        for text in TEXTS:
            ids = tokenizer.encode(text)
            greedy, margin = continued(model, ids)
            print(name, len(ids), margin, repr(tokenizer.decode(greedy)), flush=True)
            texts.append({"text": text, "ids": ids, "greedy": greedy, "margin": margin})
        found[name] = {"file": file, "texts": texts}
    OUT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
