"""Conversations that version 0.1 saved: their model, their prompts, and the script that wrote them.

With that version's kvjax, ``python tests/support/saved_talks.py tests/golden/saved-0.1`` wrote the files there. They
are never made again: ``tests/test_saved_by_earlier_versions.py`` shows that later versions still read them. The model's
weights come from NumPy's frozen ``RandomState``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tarfile
import tempfile
from typing import Any

import tokenizers
from support import tiny

CASE = tiny.TinyCase("saved", tiny._llama(num_hidden_layers=3, max_position_embeddings=512))
#: Conversations by name: policy, storage, and whether several rows are saved together.
TALKS: dict[str, tuple[str, str, int]] = {
    "lagkv-int8": ("lagkv:ratio=0.5,lag=8,sink=2", "int8", 2),
    "h2o": ("h2o:budget=16", "model", 1),
    "razor-profile": ("razor:budget=16,profile=profile.yaml", "model", 1),
    "rounds": ("round:watershed=1,top=0.4", "model", 1),
    "rounds-int8": ("round:watershed=2,strategy=above_mean,inner=lagkv(ratio=0.5,lag=8,sink=2)", "int8", 1),
}
#: A turn's answer, and the one that comes after the conversation was saved.
NEW, LATER = 4, 12
CONFIG = """\
# Flags of version 0.1.
policy:
  razor:
    budget: 16
    profile: profile.yaml
storage: int8
chat: false
max-new-tokens: 12
"""


def model(folder: pathlib.Path) -> Any:
    """The model of these conversations; a token is a word."""
    import kvjax

    tiny.write_folder(CASE, folder)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return dataclasses.replace(kvjax.load(folder, dtype="float32", progress=False), stop_token_ids=())


def turns(name: str, rows: int) -> list[list[list[int]]]:
    """Prompts by turn and row; the last turn's are asked once the conversation was saved."""
    sizes = (30, 9, 14, 6)
    return [[tiny._random(f"{name}/{turn}/{row}").randint(1, tiny.VOCAB, size - row).tolist() for row in range(rows)]
            for turn, size in enumerate(sizes)]  # fmt: skip


def prompt() -> str:
    """The text that the command line is asked to continue."""
    return " ".join(f"w{i}" for i in tiny._random("saved/text").randint(1, tiny.VOCAB, 40))


def follow(lm: Any, cache: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens that continue every row of a cache."""
    import kvjax

    return [list(one.tokens) for one in kvjax.generate(lm, prompts, cache=cache, max_new_tokens=LATER)]


def main(out: pathlib.Path) -> None:
    import os

    import kvjax
    from kvjax.calibrate.profile import HeadProfile, ModelShape, save_profile  # pyright: ignore[reportMissingImports]

    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)
    (out / "config.yaml").write_text(CONFIG)
    with tempfile.TemporaryDirectory() as scratch:
        lm = model(pathlib.Path(scratch) / "model")
        tables = [[[round(float(x), 4) for x in row] for row in tiny._random(name).rand(3, 4)] for name in "ei"]
        echo, induction = (tuple(map(tuple, table)) for table in tables)
        save_profile(HeadProfile("saved", ModelShape.of(lm.config), 20, 4, 0, echo, induction), "profile.yaml")
        expected: dict[str, Any] = {"version": kvjax.__version__, "talks": {}}
        for name, (policy, storage, rows) in TALKS.items():
            *held, later = turns(name, rows)
            cache: Any = None
            for prompts in held:
                how = {"policy": policy, "storage": storage} if cache is None else {"cache": cache}
                outputs = kvjax.generate(lm, prompts, max_new_tokens=NEW, **how)
                cache = [output.cache for output in outputs]
            whole = kvjax.concatenate(cache)
            kvjax.save_cache(pathlib.Path(scratch) / name, whole, lm)
            with tarfile.open(out / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(pathlib.Path(scratch) / name, name)
            after = kvjax.load_cache(pathlib.Path(scratch) / name, lm)
            tokens = follow(lm, after, later)
            assert tokens == follow(lm, whole, later)
            expected["talks"][name] = {"seen": [int(n) for n in whole.seen], "tokens": tokens}
        options = {"policy": "razor:budget=16,profile=profile.yaml", "storage": "int8", "chat": False}
        found = kvjax.generate(lm, prompt(), max_new_tokens=12, **options)
        expected["config"] = list(found.tokens)
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
