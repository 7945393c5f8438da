"""Real models besides the default one, where their files are: they continue texts as the reference, and find needles.

``scripts/golden_real.py`` made the golden continuations and says which files they are of; they are looked for in the
folder that ``KVJAX_CACHE`` names, or the user's cache folder. Run by ``pytest -m slow``.
"""

from __future__ import annotations

import json
import pathlib

import pytest
from support.needles import run_needles

import kvjax
from kvjax.files import cache_folder

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "real.json").read_text())
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=GOLDEN)
def real(request) -> tuple[str, kvjax.LanguageModel]:
    path = cache_folder() / GOLDEN[request.param]["file"]
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {path.parent}")
    return request.param, kvjax.load(path, dtype="float32", progress=False)


def test_texts_are_continued_as_the_reference_does(real):
    name, lm = real
    texts = GOLDEN[name]["texts"]
    for text in texts:
        assert [*lm.tokenizer.prefix_ids, *lm.tokenizer.encode(text["text"])] == text["ids"]
    asked = {"max_new_tokens": len(texts[0]["greedy"]), "stop_token_ids": []}
    for text, output in zip(texts, kvjax.generate(lm, [text["ids"] for text in texts], **asked), strict=True):
        # A step whose best tokens are this near is either's.
        if text["margin"] > 1e-3:
            assert list(output.tokens) == text["greedy"], text["text"][:40]
    assert max(text["margin"] for text in texts) > 1e-3


#: Samples of four that are found at 1,000 tokens at least: Gemma is a base model without a chat template.
FOUND = {"qwen2": {"full": 4, "lagkv:ratio=0.5": 3}, "gemma3": {"full": 3, "lagkv:ratio=0.75": 2}}


@pytest.mark.parametrize("compressed", [False, True], ids=["full", "lagkv"])
def test_needles(real, compressed):
    name, lm = real
    policy, least = list(FOUND[name].items())[compressed]
    result = run_needles(lm, policy, 1000, 4, batch=2)
    assert result.hits >= least, [answer.text for answer in result.answers]
    if compressed:
        assert result.cache_share < 0.95  # the rings of a window are never smaller
