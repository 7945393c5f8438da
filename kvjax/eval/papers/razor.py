"""RazorAttention (Tang et al. 2024, arXiv:2407.15891)."""

from __future__ import annotations

from kvjax.eval.entries import Entry
from kvjax.eval.papers.paper import LONGBENCH, NEEDLES, NEEDLES_IN_VIEW, Paper, Study, published

# At the lengths of small models the paper's least buffer of 4,000 tokens would drop nothing: only its N / 5 is left.
_RAZOR = "razor:threshold=1,compression=5"
_DEFAULT = Entry(_RAZOR)

TABLE_1 = published(
    "Table 1",
    "LongBench, the recent 4K tokens in unprotected heads, accuracy in %",
    "MultiFieldQA-en, HotpotQA, 2WikiMQA",
    """
    Qwen1.5-7B | Baseline | 46.94 50.96 36.36
    | Protect 0% heads | 37.36 42.36 31.33
    | Protect 15% heads (Random) | 38.33 42.46 31.97
    | Protect 15% heads (Retrieval) | 46.66 50.49 36.12
    """,
)
TABLE_3 = published(
    "Table 3",
    "LongBench",
    "NrtvQA, Qasper, MF-en, MF-zh, HotpotQA, 2WikiMQA, Musique, GovReport, QMSum, MultiNews, VCSUM, TREC, TriviaQA, "
    "LSHT, Lcc, Average",
    """
    Qwen1.5-7B-Chat | All KV | 17.58 43.16 46.94 60.98 50.96 36.36 27.86 28.78 23.24 24.02 13.91 17.64 83.77 16.96 48.35 36.03
    | StreamingLLM | 6.22 24.62 18.9 34.51 20.68 12.31 5.88 3.86 3.52 20.74 3.17 8.5 36.57 13 42.51 17.00
    | H2O | 16.5 38.15 40.22 51.46 50.19 35.69 27.12 28.42 22.00 22.70 14.03 18.25 83.72 16.4 47.54 34.16
    | RA | 16.63 43.1 46.66 61.08 50.49 36.1 28.79 26.68 22.59 23.96 13.83 20.87 83.83 15.66 47.85 35.87
    Qwen1.5-72B-Chat | All KV | 28.32 46.73 48.25 63.41 55.91 46.23 34.56 32.47 22.69 24.86 15.61 71.0 91.15 46 65.05 46.15
    | StreamingLLM | 9.57 28.33 19.06 34.98 25.32 13.42 10.08 4.11 3.79 21.1 3.74 43.0 43.72 20.5 53.6 22.29
    | H2O | 27.98 41.45 43.69 55.93 54.77 45.16 34.61 32.24 22.35 24.36 14.5 70.0 91.15 42 64.2 44.29
    | RA | 27.97 46.44 47.36 63.04 55.92 46.15 34.36 32.35 22.75 24.91 15.17 71.0 91.49 46 64.68 45.97
    Llama3-8B-Instruct | All KV | 21.84 37.04 45.07 52.34 44.63 27.28 23.04 28.18 24.54 26.26 14.41 0 85.90 3 30.17 35.44
    | StreamingLLM | 0.61 16.29 13.41 20.05 2 5.84 0.37 5.22 4.63 18.89 2.52 - 11.54 - 26.83 9.86
    | H2O | 21.14 34.1 40.84 47.13 43.47 27.13 21.31 22.85 16.36 22.3 14.52 - 86.17 - 30.26 32.89
    | RA | 21.16 36.22 42.88 51.93 44.07 26.89 22.03 26.56 23.86 25.83 15.69 - 85.83 - 30.25 34.86
    Baichuan2-13B | All KV | 18.63 30.16 44.1 50.36 37.93 32.62 13.90 26.16 20.14 24.58 15.66 62.5 86.61 27.5 55.36 36.41
    | StreamingLLM | 5.12 12.44 23.53 32.52 16.93 16.08 6.15 5.53 1.03 5.6 3.94 42.22 30.15 7.32 35.42 16.27
    | H2O | 17.81 29.89 43.74 49.54 37.02 31.71 13.54 25.8 18.96 23.31 15.11 62.41 85.25 26.86 54.45 35.69
    | RA | 18.22 31.87 43.6 51.36 36.97 32.89 13.98 25.51 20.13 24.51 15.41 62.5 87.23 28 54.53 36.45
    """,  # noqa: E501
)
TABLE_4 = published(
    "Table 4",
    "Needle in a Haystack by fraction of heads protected, in %",
    "Score",
    """
    Qwen1.5-7B-Chat | 1% Echo + 5% Induction Head | 69.54
    | 1% Echo + 8% Induction Head | 78.40
    | 1% Echo + 11% Induction Head | 84.55
    | 1% Echo + 14% Induction Head | 86.59
    | Baseline | 87.05
    """,
)
TABLE_6 = published(
    "Table 6",
    "InfiniteBench",
    "Original Model, RA Model",
    """
    Llama3.1-8B-Instruct | codedebug | 21.57 21.57
    | ensum | 30.71 30.58
    | endia | 19.50 19.50
    | enqa | 29.09 29.50
    | enmc | 63.31 63.31
    """,
)
TABLE_7 = published(
    "Table 7",
    "Speed-up on 8 Ascend 910B NPUs",
    "Prefill, Decoding",
    """
    GLM-9B-1M | 128k, batch 1 | 1.2% 3.1%
    | 128k, batch 4 | 5.66% 15.9%
    | 128k, batch 8 | 8.03% 26.67%
    | 128k, batch 10 | 7.05% 29.47%
    | 256k, batch 1 | 6.58% 9.2%
    | 256k, batch 4 | 8.76% 25.47%
    | 256k, batch 5 | 9.93% 29.01%
    """,
)

PAPER = Paper(
    name="razor",
    title="RazorAttention: Efficient KV Cache Compression Through Retrieval Heads",
    arxiv="2407.15891",
    studies=(
        Study(
            "heads",
            "Table 4: heads protected (the others keep 4 sinks, N / 5 recent tokens and a compensation token)",
            NEEDLES,
            {
                f"1% Echo + {share}% Induction Head": Entry(f"{_RAZOR},induction_share={share / 100:g}")
                for share in (5, 8, 11)
            }
            | {"1% Echo + 14% Induction Head": _DEFAULT},
            ("1% Echo + 5% Induction Head", "1% Echo + 14% Induction Head"),
            "The paper's needle is in essays of up to 32K tokens; here RULER's tasks that need no text, and no buffer "
            "of at least 4,000 tokens, which would drop nothing at this length.",
            beside=("Table 4", "Score"),
            full="Baseline",
        ),
        Study(
            "ablation",
            "Figures 7 and 8: without echo heads, and without the compensation token",
            NEEDLES,
            {
                "RazorAttention": _DEFAULT,
                "without echo heads": Entry(f"{_RAZOR},echo_share=0"),
                "without compensation token": Entry(f"{_RAZOR},compensation=false"),
            },
            ("RazorAttention", "without echo heads"),
            "The figures have no numbers: heat maps of Llama2-7B-80K up to 80K tokens.",
        ),
        Study(
            "snapkv",
            "Figure 6: RazorAttention and SnapKV, the question unknown to the compression",
            NEEDLES,
            {"RazorAttention": _DEFAULT, "SnapKV": Entry("snapkv", 0.5)},
            ("RazorAttention", "SnapKV"),
            "The figure has no numbers: heat maps of Llama-3.1-70B.",
        ),
        Study(
            "snapkv-in-view",
            "Figure 6: the same, the question known to the compression",
            NEEDLES_IN_VIEW,
            {"RazorAttention": _DEFAULT, "SnapKV": Entry("snapkv", 0.5)},
            (),
            "The figure has no numbers.",
        ),
        Study(
            "longbench",
            "Table 3: LongBench, one data set of each group",
            LONGBENCH,
            {
                "StreamingLLM": Entry("streamingllm", 0.5),
                "H2O": Entry("h2o", 0.5),
                "RA": _DEFAULT,
            },
            (),
            "The average is of six of the paper's fifteen data sets and of few questions, so not its Average.",
            full="All KV",
        ),
    ),
    published=(TABLE_1, TABLE_3, TABLE_4, TABLE_6, TABLE_7),
    missing=(
        "Table 1's random heads: a fraction of heads drawn at random is no option of the policy.",
        "Figures 1, 4 and 5 (needles up to 1M tokens), Tables 5 and 6 (RULER and InfiniteBench, 16K tokens and more): "
        "beyond the length measured here. `kvjax eval --suite needle-map` and `--suite ruler` ask them of a model that "
        "reads so much.",
        "Table 7 (speed on eight NPUs): the columns of tokens/s are this machine's.",
    ),
)
