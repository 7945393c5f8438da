"""Ask lm-evaluation-harness's own ``hf`` backend (torch, transformers) what kvjax's adapter is compared with.

Needs torch, transformers, gguf and lm_eval 0.4.13; nobody needs them to install, run or test kvjax. From the
repository:

    python scripts/golden_harness.py SmolLM2-135M-Instruct.Q4_1.gguf    # tests/golden/harness.json

The GGUF's weights in float32 answer three small tasks, a kind of request each. ``lm_eval``: its version; ``max_length``
of the rolling task's windows; ``tasks``: of each its configuration (``config``), its items (``rows``), the harness's
``scores``, and ``requests``: what the backend was asked, as token ids, and what it found, item by item:

* ``choices``: ``context``, ``continuation``, ``logprob``, ``is_greedy``; ``item`` is the row of a choice.
* ``texts``: the same of each window of a text, which overlap nowhere; ``totals`` has the sum of each text.
* ``answers``: ``context``, ``text``.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the harness is imported

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import golden_harness_items as items  # noqa: E402
from golden_logits import read_tokenizer, reference  # noqa: E402
from support.harness_tasks import with_data  # noqa: E402

OUT = ROOT / "tests" / "golden" / "harness.json"
#: Tokens of a window, so that one text has several.
MAX_LENGTH = 256
#: Decimals of a log-probability: float32 has no more.
DECIMALS = 5


def tasks() -> dict[str, dict[str, Any]]:
    """Configuration and rows of each task."""
    choice = {"doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    answer = {
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["^ "], "ignore_case": True}],
    }
    questions = []
    for number, (question, choices) in enumerate(items.QUESTIONS):
        gold = number % len(choices)
        turned = choices[len(choices) - gold :] + choices[: len(choices) - gold]
        questions.append({"text": f"{items.EXAMPLES}Q: {question}\nA:", "choices": list(turned), "gold": gold})
    return {
        "choices": {
            "config": {
                "output_type": "multiple_choice", **choice, "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]
            },
            "rows": questions,
        },
        "texts": {
            "config": {
                "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
            },
            "rows": [{"text": text} for text in items.TEXTS],
        },
        "answers": {
            "config": {
                "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{wanted}}", **answer
            },
            "rows": [{"text": text, "wanted": wanted} for text, wanted in items.BEGINNINGS],
        },
    }  # fmt: skip


class Recorded(HFLM):
    """The backend, which also keeps the token ids that it was asked about, with what it found."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.kept: list[dict[str, Any]] = []

    def _loglikelihood_tokens(self, requests: Any, *more: Any, **how: Any) -> Any:
        found = super()._loglikelihood_tokens(requests, *more, **how)
        for (_, context, continuation), (logprob, greedy) in zip(requests, found, strict=True):
            asked = {"context": list(context), "continuation": list(continuation)}
            self.kept.append({**asked, "logprob": round(float(logprob), DECIMALS), "is_greedy": bool(greedy)})
        return found


def main(path: pathlib.Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    tokenizer = read_tokenizer(path)
    # As SmolLM2's own tokenizer has them.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    model = reference(path.parent, gguf_file=path.name)
    record: dict[str, Any] = {"lm_eval": lm_eval.__version__, "max_length": MAX_LENGTH, "tasks": {}}
    for name, task in tasks().items():
        backend = Recorded(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu", max_length=MAX_LENGTH)
        with tempfile.TemporaryDirectory() as folder:
            given = with_data(pathlib.Path(folder), name, task)
            found = lm_eval.simple_evaluate(model=backend, tasks=[given], bootstrap_iters=0, log_samples=True)
        scores = {key: value for key, value in found["results"][name].items() if key.endswith(",none")}
        scores = {key: value for key, value in scores.items() if "stderr" not in key}
        samples = sorted(found["samples"][name], key=lambda one: one["doc_id"])
        answers = [sample["resps"] for sample in samples]
        entry: dict[str, Any] = {**task, "scores": scores, "requests": backend.kept}
        if name == "choices":
            numbers = [number for number, row in enumerate(task["rows"]) for _ in row["choices"]]
            entry["requests"] = [{"item": item, **one} for item, one in zip(numbers, backend.kept, strict=True)]
        elif name == "texts":
            entry["totals"] = [round(float(one[0][0]), DECIMALS) for one in answers]
        else:
            contexts = [tokenizer.encode(row["text"], add_special_tokens=False) for row in task["rows"]]
            entry["requests"] = [
                {"context": ids, "text": one[0][0]} for ids, one in zip(contexts, answers, strict=True)
            ]
        record["tasks"][name] = entry
        print(name, len(task["rows"]), scores, flush=True)
    OUT.write_text(lines(record))


def lines(record: dict[str, Any]) -> str:
    """The record as JSON, a line an item."""
    text = json.dumps({**record, "tasks": None}, ensure_ascii=False)[:-5]
    parts = []
    for name, task in record["tasks"].items():
        fields = [
            f"{json.dumps(key)}: "
            + (
                "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in value) + "\n]"
                if key in ("rows", "requests")
                else json.dumps(value, ensure_ascii=False)
            )
            for key, value in task.items()
        ]
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n}")
    return text + "{\n" + ",\n".join(parts) + "\n}}\n"


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
