"""SlimKV (anonymous, "Preserving Large Activations: The Key to KV Cache Pruning")."""

from __future__ import annotations

from kvjax.eval.entries import Entry
from kvjax.eval.papers.paper import LONGBENCH_IN_VIEW, NEEDLES_IN_VIEW, Paper, Study, published

_SIZES = (0.5, 0.25)


def _at(policies: dict[str, str]) -> dict[str, Entry]:
    return {f"{label}, {size:g}": Entry(policy, size) for label, policy in policies.items() for size in _SIZES}


TABLE_1 = published(
    "Table 1",
    "LongBench average of multi-head models, as the text gives it",
    "KV size 256, KV size 2048",
    """
    Llama-2-7B | SlimKV | 29.78 31.52
    | best other method | 29.22 31.42
    """,
)
TABLE_2 = published(
    "Table 2",
    "LongBench average of grouped-query models, as the text gives it",
    "KV size 128, KV size 2048, full",
    """
    Mistral-7B | SlimKV | 30.58 39.97 39.76
    | best other method | 26.60 31.12 39.76
    """,
)
TABLE_3 = published(
    "Table 3",
    "ablation, LongBench average",
    "Average",
    """
    Llama-2-7B | SlimKV (S1 x S2) | 29.78
    | without S2 | 27.53
    | without S1 | 27.32
    """,
)

PAPER = Paper(
    name="slimkv",
    title="Preserving Large Activations: The Key to KV Cache Pruning (SlimKV)",
    arxiv="",
    studies=(
        Study(
            "ablation",
            "Table 3: attention (S1), value activation (S2), and their product, by fraction retained",
            NEEDLES_IN_VIEW,
            _at({"SlimKV (S1 x S2)": "slimkv", "without S2": "slimkv:score=s1", "without S1": "slimkv:score=s2"}),
            ("SlimKV (S1 x S2), 0.25", "without S2, 0.25", "without S1, 0.25"),
            "The paper's average is LongBench's, at 128 tokens a head (its text) or 256 (the same number in Table 1).",
        ),
        Study(
            "methods",
            "Tables 1 and 2: SlimKV beside SnapKV, H2O and StreamingLLM, by fraction retained",
            NEEDLES_IN_VIEW,
            _at({"SlimKV": "slimkv", "SnapKV": "snapkv", "H2O": "h2o", "StreamingLLM": "streamingllm"}),
            ("SlimKV, 0.25", "SnapKV, 0.25"),
            "RULER's tasks that need no text, in place of LongBench.",
        ),
        Study(
            "longbench",
            "Tables 1 and 2 on LongBench, one data set of each group",
            LONGBENCH_IN_VIEW,
            {
                "SlimKV": Entry("slimkv:budget=256"),
                "SnapKV": Entry("snapkv:budget=256"),
                "H2O": Entry("h2o:budget=256"),
                "StreamingLLM": Entry("streamingllm:budget=256"),
            },
            (),
            "The average is of six of the paper's seventeen data sets and of few questions.",
        ),
    ),
    published=(TABLE_1, TABLE_2, TABLE_3),
    missing=(
        "The rows of Tables 1 and 2 by data set: the text at hand of the paper has their captions and sentences.",
    ),
)
