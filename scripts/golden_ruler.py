"""Record the samples RULER's own generator makes, for the test of ``kvjax.eval.ruler``.

    python scripts/golden_ruler.py CHECKOUT      # of github.com/NVIDIA/RULER, Apache-2.0 licence, only read

Needs wonderwords. Words separated by white space stand for tokens, so no tokenizer is needed.

``tests/golden/ruler.json`` is a list; an entry holds ``task`` (haystack, key, value, keys, values, queries), ``length``
and ``samples``: ``sha256`` of the UTF-8 input up to the answer prefix, ``question``, ``answer_prefix``, ``outputs``,
``length``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import pathlib
import sys
import types
from typing import Any

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "golden" / "ruler.json"
SAMPLES = 4
# haystack, key, value, keys, values, queries, length
QUESTIONS = (
    ("noise", "words", "numbers", 1, 1, 1, 1500),
    ("noise", "words", "numbers", 1, 1, 1, 4096),
    ("needle", "words", "numbers", 1, 1, 1, 4096),
    ("needle", "uuids", "uuids", 1, 1, 1, 2000),
    ("noise", "words", "numbers", 1, 4, 1, 2000),
    ("noise", "words", "words", 4, 1, 4, 2000),
    ("needle", "words", "uuids", 2, 2, 2, 1000),
)


def load_generator(checkout: pathlib.Path, question: tuple[Any, ...]) -> dict[str, Any]:
    """Names of the generator's module, run with the command line that asks ``question``."""
    folder = checkout / "scripts" / "data" / "synthetic"
    constants: dict[str, Any] = {}
    exec((folder / "constants.py").read_text(), constants)
    # Modules the generator imports and this use of it does not need.
    words = types.SimpleNamespace(text_to_tokens=str.split)
    for name, content in {
        "nltk": {},
        "nltk.tokenize": {"sent_tokenize": None},
        "tokenizer": {"select_tokenizer": lambda *_: words},
        "manifest_utils": {"write_manifest": None},
        "constants": constants,
    }.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(content)
    prompt = constants["TASKS"]["niah"]
    haystack, key, value, keys, values, queries, length = question
    options = {
        "template": prompt["template"] + prompt["answer_prefix"],
        "tokens_to_generate": prompt["tokens_to_generate"],
        "type_haystack": haystack,
        "type_needle_k": key,
        "type_needle_v": value,
        "num_needle_k": keys,
        "num_needle_v": values,
        "num_needle_q": queries,
        "max_seq_length": length,
        "num_samples": SAMPLES,
    } | dict.fromkeys(("save_dir", "save_name", "tokenizer_path", "tokenizer_type"), "unused")
    sys.argv = ["niah.py", *(f"--{name}={value}" for name, value in options.items())]
    names = {"__name__": "niah", "__file__": str(folder / "niah.py")}
    exec(compile((folder / "niah.py").read_text(), "niah.py", "exec"), names)
    logging.disable()
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    checkout = parser.parse_args().checkout
    record = []
    for question in QUESTIONS:
        generate = load_generator(checkout, question)["generate_samples"]
        samples = [
            {
                "sha256": hashlib.sha256(sample["input"].encode()).hexdigest(),
                "question": sample["input"].rpartition("\n")[2],
                "answer_prefix": sample["answer_prefix"],
                "outputs": sample["outputs"],
                "length": sample["length"],
            }
            for sample in generate(SAMPLES, question[-1], pathlib.Path())
        ]
        task = dict(zip(("haystack", "key", "value", "keys", "values", "queries"), question[:-1], strict=True))
        record.append({"task": task, "length": question[-1], "samples": samples})
    OUT.write_text("[\n" + ",\n".join(map(json.dumps, record)) + "\n]\n")


if __name__ == "__main__":
    main()
