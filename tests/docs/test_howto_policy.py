"""The page that writes a policy runs as printed, and its policy keeps what it says it keeps."""

from __future__ import annotations

import json

import pytest
import toys
from support.howto import ROOT, blocks, run_page

import kvjax
from kvjax.errors import KvjaxError
from kvjax.prompts import tokenize

PAGE = ROOT / "docs" / "howto" / "policy.md"
#: The page's commands load a toy instead of the default model, in a Python of their own.
STARTUP = """
import jax, toys
import kvjax, kvjax.checkpoints.load
jax.config.update("jax_disable_most_optimizations", True)
kvjax.load = kvjax.checkpoints.load.load = lambda *_, **__: toys.needle_model()
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys, forgotten_policies):
    lm = toys.needle_model()
    monkeypatch.setattr(kvjax, "load", lambda name: lm)
    page = run_page(PAGE, tmp_path, {}, STARTUP)
    printed = capsys.readouterr().out
    for held in ("plan: slots", "full: where", "row alone: a", "later turn: a", "int8: rows", "composition: it"):
        assert f"\n{held}" in printed, f"check_policy does not say that it holds: {held}"
    assert "Forgetful.select keeps nothing of" in printed

    # The rule again, by sets of positions: the context is compressed alone, then with the question; what is generated
    # stays.
    stats = page["output"].stats
    first = len(tokenize(lm, page["question"], context=page["article"], chat=True, onto=False).context)

    def rule(positions: set[int], total: int) -> set[int]:
        return {p for p in positions if p % 4 == 0 or p >= total - 64}

    kept = rule(set(range(first)), first)
    kept = rule(kept | set(range(first, stats.prompt_tokens)), stats.prompt_tokens)
    kept |= set(range(stats.prompt_tokens, stats.seen))
    assert len(kept) < stats.seen / 2
    assert stats.retained == ((len(kept),) * lm.config.num_kv_heads,) * lm.config.num_layers

    (shard,) = (tmp_path / "answers").glob("part-*")
    records = [json.loads(line) for line in shard.read_text(encoding="utf-8").splitlines()]
    assert [record["id"] for record in records] == [1, 2, 3, 4] and all("text" in record for record in records)
    rows = json.loads((tmp_path / "comparison" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert [row["policy"] for row in rows] == ["full", "strided"]
    assert not any(row["refused"] for row in rows) and rows[1]["live_bytes"] < rows[0]["live_bytes"] / 2
    assert (tmp_path / "comparison" / "accuracy.png").exists()


def test_its_numbers_of_slots_are_those_of_its_rule(forgotten_policies):
    source = next(block for block in blocks(PAGE) if block.title == "strided.py")
    made: dict = {"__name__": "strided"}
    exec(compile(source.body, "strided.py", "exec", dont_inherit=True), made)
    policy = made["Strided"](stride=3, recent=10)
    for total in range(1, 200):
        assert policy.kept(total) == sum(p % 3 == 0 or p >= total - 10 for p in range(total))
    with pytest.raises(KvjaxError, match="stride"):
        made["Strided"](stride=0)
