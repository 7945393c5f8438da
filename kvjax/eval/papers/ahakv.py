"""AhaKV (Gu et al. 2025, arXiv:2506.03762)."""

from __future__ import annotations

from kvjax.eval.entries import Entry
from kvjax.eval.papers.paper import LONGBENCH_IN_VIEW, NEEDLES_IN_VIEW, SHORT, Paper, Study, published

_COLUMNS = "Code Complete, Few Shot, Single-doc QA, Multi-doc QA, Summarization, Passage Retrieval, Average"
_BUDGETS = (0.6, 0.4, 0.2, 0.1, 0.04)

TABLE_1 = published(
    "Table 1",
    "LongBench at 1,000 tokens a head (LLAMA2-7B 720), 32 of them recent",
    _COLUMNS,
    """
    LLaMA3-8B-Inst | Full Cache | 54.47 57.75 41.55 32.33 20.14 54.83 41.94
    | Sink | 56.59 53.03 30.31 26.88 17.75 26.50 33.55
    | H2O | 58.88 54.57 38.61 30.76 19.75 41.70 38.93
    | SnapKV | 56.52 56.36 40.56 31.06 18.22 54.33 40.99
    | NACL | 56.62 54.78 40.32 31.39 18.49 54.33 40.77
    | TOVA | 53.45 57.29 38.6 30.74 17.63 53.30 40.18
    | AhaKV | 57.14 57.13 41.25 31.85 18.66 54.83 41.63
    Qwen2-7B-Inst | Full Cache | 59.35 61.60 45.20 34.35 22.65 39.33 42.47
    | Sink | 56.09 55.41 29.56 26.45 19.43 15.33 32.46
    | H2O | 52.72 56.14 37.82 31.77 21.15 22.67 36.24
    | SnapKV | 59.08 60.37 43.99 33.33 20.71 38.50 41.30
    | NACL | 58.67 53.67 41.80 32.02 20.83 38.00 39.27
    | TOVA | 56.91 56.65 37.97 30.69 19.00 35.61 37.99
    | AhaKV | 59.30 61.04 44.18 33.98 22.02 38.33 41.84
    LLAMA2-7B-Chat | Full Cache | 55.72 51.99 22.28 18.56 18.55 5.34 27.28
    | Sink | 53.35 49.26 14.11 15.01 15.66 1.94 23.27
    | H2O | 42.66 49.32 20.46 16.29 18.27 4.01 24.51
    | SnapKV | 55.32 50.95 21.50 17.65 16.82 5.57 26.39
    | NACL | 54.50 49.84 19.92 17.82 16.97 6.54 26.04
    | TOVA | 53.68 51.16 16.10 16.41 15.68 4.34 24.66
    | AhaKV | 55.06 51.49 22.20 18.16 17.12 5.57 26.78
    Gemma-7B-Inst | Full Cache | 46.91 52.75 33.82 23.81 20.47 27.02 33.25
    | Sink | 48.84 49.78 20.34 18.63 18.05 15.33 27.18
    | H2O | 50.01 49.99 29.88 21.29 20.13 22.55 31.09
    | SnapKV | 47.66 52.45 32.89 22.35 18.84 26.29 32.39
    | NACL | 47.09 50.35 31.81 21.93 19.12 26.69 31.77
    | TOVA | 45.69 49.20 30.61 21.20 18.78 25.38 30.80
    | AhaKV | 49.37 53.26 32.88 22.93 19.38 27.36 33.08
    """,
)
TABLE_2 = published(
    "Table 2",
    "ablation on LongBench",
    "2Wiki, TriQA, Multi-EN, lcc, Samsum, Avg",
    """
    LLAMA2-7B-Chat | w/o RA | 30.26 84.47 36.44 55.77 39.7 49.33
    | w/o SGS | 30.5 82.85 37.89 58.0 39.6 49.76
    | w/o VPE | 29.54 82.94 33.96 58.16 41.06 49.13
    | AhaKV | 30.91 84.34 39.21 58.4 40.1 50.59
    """,
)
TABLE_3 = published(
    "Table 3",
    "LongBench, models of other sizes",
    _COLUMNS,
    """
    Qwen2-1.5B-Inst | Full Cache | 39.93 54.77 36.53 28.3 22.36 8.33 32.03
    | Sink | 39.26 49.5 22.64 20.52 17.45 5.33 25.47
    | H2O | 38.9 49.09 23.52 21.34 18.07 5.17 25.78
    | SnapKV | 40.31 54.59 33.81 26.15 18.73 8.16 30.39
    | NACL | 39.59 51.91 31.48 25.46 18.87 8.33 29.29
    | TOVA | 37.61 49.91 29.14 23.83 17.18 6.00 27.31
    | AhaKV | 39.99 54.68 34.60 29.10 19.81 8.83 31.39
    Qwen1.5-4B-Chat | Full Cache | 34.29 57.13 40.98 31.66 22.80 11.83 34.02
    | Sink | 34.24 52.73 26.29 21.76 18.51 7.66 27.08
    | H2O | 36.61 51.48 37.81 29.06 21.52 10.33 31.61
    | SnapKV | 35.10 55.69 40.09 30.48 20.13 10.83 32.77
    | NACL | 35.39 53.18 39.05 29.14 19.93 11.17 31.89
    | TOVA | 33.1 51.56 37.4 28.54 19.65 10.00 30.70
    | AhaKV | 35.30 55.37 40.25 31.10 20.78 11.50 33.09
    Qwen1.5-14B-Chat | Full Cache | 56.64 60.24 42.65 37.85 22.24 53.66 44.11
    | Sink | 55.10 54.39 26.80 26.94 19.03 16.00 31.75
    | H2O | 56.07 57.37 39.84 36.04 22.83 51.91 42.48
    | SnapKV | 56.97 59.22 41.50 36.54 21.04 53.33 43.20
    | NACL | 56.67 57.15 40.67 36.15 21.36 53.5 42.66
    | TOVA | 52.63 57.15 39.02 35.06 20.8 52.33 41.24
    | AhaKV | 61.79 59.45 41.22 36.88 21.59 53.67 43.87
    """,
)
FIGURE_8 = published(
    "Section A.4",
    "cache of 32K + 512 tokens, in GB",
    "GB",
    """
    Qwen2-7B-Inst | full | 5.98
    | AhaKV, 2048 tokens a head | 0.39
    """,
)
_SHORT_POLICIES = {"AhaKV": "ahakv:recent=8", "H2O": "h2o", "NACL": "nacl", "TOVA": "tova"}
_METHODS = {"Sink": "streamingllm", "H2O": "h2o", "SnapKV": "snapkv", "NACL": "nacl", "TOVA": "tova", "AhaKV": "ahakv"}

PAPER = Paper(
    name="ahakv",
    title="AhaKV: Adaptive Holistic Attention-Driven KV Cache Eviction",
    arxiv="2506.03762",
    studies=(
        Study(
            "ablation",
            "Table 2: without recent accumulation (RA), step gain softmax (SGS), value prior (VPE); a quarter retained",
            NEEDLES_IN_VIEW,
            {
                "w/o RA": Entry("ahakv:recent_accumulation=false", 0.25),
                "w/o SGS": Entry("ahakv:step_gain=false", 0.25),
                "w/o VPE": Entry("ahakv:value_prior=false", 0.25),
                "AhaKV": Entry("ahakv", 0.25),
            },
            ("w/o VPE", "AhaKV"),
            "RULER's tasks that need no text, in place of five of LongBench's data sets.",
            full="Full Cache",
        ),
        Study(
            "methods",
            "Table 1: the eviction strategies, a quarter retained",
            NEEDLES_IN_VIEW,
            {label: Entry(policy, 0.25) for label, policy in _METHODS.items()},
            ("SnapKV", "AhaKV"),
            "RULER's tasks that need no text, not LongBench; a quarter of each prompt in place of 1,000 tokens.",
            full="Full Cache",
        ),
        Study(
            "longbench",
            "Tables 1 and 3: LongBench, one data set of each group, 1,000 tokens a head",
            LONGBENCH_IN_VIEW,
            {label: Entry(f"{policy}:budget=1000") for label, policy in _METHODS.items()},
            (),
            "The average is of six data sets and of few questions.",
            full="Full Cache",
        ),
        Study(
            "short",
            "Figure 4: short texts by fraction retained",
            SHORT,
            {
                f"{label}, {budget:g}": Entry(policy, budget)
                for label, policy in _SHORT_POLICIES.items()
                for budget in _BUDGETS
            },
            ("AhaKV, 0.2", "H2O, 0.2"),
            "The figure has no numbers. Here worked examples are compressed and the question is read after them; a "
            "recent window of 8 tokens, because 32 are more than the smallest budgets.",
            full="Full Cache",
        ),
    ),
    published=(TABLE_1, TABLE_2, TABLE_3, FIGURE_8),
    missing=(
        "Figure 8 (speed at 32K tokens by budget): the columns of tokens/s are this machine's, at short lengths.",
    ),
)
