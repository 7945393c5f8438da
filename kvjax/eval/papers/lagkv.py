"""LagKV (Liang et al. 2025, arXiv:2504.04704)."""

from __future__ import annotations

from kvjax.eval.entries import Entry
from kvjax.eval.papers.paper import LONGBENCH, NEEDLES, PASSKEY, Paper, Study, published

_RULER = "SK1, SK2, SK3, MK1, MK2, MK3, MV, MQ, VT, CWE, FWE, QA1, QA2, AVERAGE"
_GROUPS = "Single. QA, Multi. QA, Summ., Few-shot, Synthetic, Code, LB Avg., Needle"
#: A short prompt has room for partitions of this many tokens, an eighth of the paper's 128 to 1,024 and less.
LAGS = (64, 32, 16)
_TIMES = {2: 0.5, 4: 0.25, 6: 0.167, 8: 0.125}

TABLE_1 = published(
    "Table 1",
    "RULER-16K; the label's number is the fraction removed",
    _RULER,
    """
    Llama-3.1-8B-Instruct | FullKV | 100.0 100.0 100.0 97.4 100.0 100.0 100.0 98.2 100.0 90.2 87.5 75.7 54.7 92.6
    | SnapKV, 0.25 | 100.0 100.0 33.3 98.7 83.3 63.9 97.9 98.2 94.8 85.3 90.2 64.9 46.9 81.3
    | StreamingLLM, 0.25 | 72.5 74.7 72.5 79.2 86.7 66.7 72.7 75.0 90.5 0.1 87.1 75.7 43.8 69.0
    | LagKV, 0.25 | 100.0 100.0 95.7 97.4 96.7 56.9 99.4 98.5 100.0 88.4 89.0 74.3 50.0 88.2
    | SnapKV, 0.5 | 100.0 94.2 15.9 93.5 48.3 15.3 77.9 87.8 94.8 72.3 85.5 44.6 37.5 66.8
    | StreamingLLM, 0.5 | 47.2 46.0 46.4 53.2 50.0 44.4 48.5 52.4 69.5 1.6 83.1 75.7 35.9 50.3
    | LagKV, 0.5 | 100.0 98.8 88.4 98.7 81.7 13.9 97.9 98.5 98.7 65.7 86.3 66.2 45.3 80.0
    | SnapKV, 0.75 | 93.4 79.3 4.3 52.0 26.7 1.4 33.5 35.7 83.0 17.1 77.2 28.4 26.6 43.0
    | StreamingLLM, 0.75 | 28.6 21.8 20.3 33.8 26.7 23.6 23.2 27.1 43.6 0.9 80.4 33.8 29.7 30.3
    | LagKV, 0.75 | 100.0 98.8 46.4 90.9 33.3 1.4 86.2 92.4 96.1 10.9 73.3 46.0 42.2 62.9
    | SnapKV, 0.875 | 85.7 43.7 4.3 26.0 15.0 1.4 17.1 14.3 61.3 1.9 66.3 18.9 26.6 29.4
    | StreamingLLM, 0.875 | 12.1 13.8 11.6 26.0 16.7 15.3 12.3 13.4 20.7 0.9 75.3 29.7 29.7 21.3
    | LagKV, 0.875 | 95.6 77.0 5.8 75.3 8.3 1.4 70.6 80.8 89.8 1.5 62.0 29.7 37.5 48.9
    """,
)
TABLE_2 = published(
    "Table 2",
    "RULER-16K; the label's number is the fraction removed",
    _RULER,
    """
    Qwen2.5-7B-Instruct | FullKV | 100.0 100.0 100.0 99.2 99.1 94.2 94.3 100.0 99.0 79.9 93.2 72.6 48.2 90.8
    | SnapKV, 0.25 | 88.2 90.6 4.5 44.5 57.1 50.0 39.8 44.9 92.2 80.1 92.8 62.9 42.0 60.7
    | StreamingLLM, 0.25 | 76.3 72.5 75.9 78.9 79.5 67.5 71.1 74.4 76.8 74.1 89.3 69.3 36.6 72.5
    | LagKV, 0.25 | 100.0 99.3 86.6 98.4 88.4 24.2 93.9 99.4 99.0 79.3 92.1 66.1 45.5 82.5
    | SnapKV, 0.5 | 86.8 64.5 3.6 24.2 28.6 9.2 21.9 23.0 90.8 77.8 92.3 40.3 35.7 46.1
    | StreamingLLM, 0.5 | 50.7 42.8 52.7 52.3 45.5 45.8 48.8 51.2 61.5 72.3 88.3 72.6 33.0 55.2
    | LagKV, 0.5 | 100.0 97.8 48.2 98.4 54.5 3.3 93.9 95.3 98.6 74.4 89.5 58.1 42.9 73.5
    | SnapKV, 0.75 | 82.2 18.8 3.6 13.3 10.7 4.2 13.2 12.2 79.7 64.4 89.3 27.4 27.7 34.4
    | StreamingLLM, 0.75 | 25.0 20.3 22.3 28.9 25.9 20.0 24.4 25.8 35.8 66.9 82.3 32.3 24.1 33.4
    | LagKV, 0.75 | 99.3 87.7 8.9 85.2 6.2 0.8 86.2 83.5 95.6 43.8 69.5 39.5 29.5 56.6
    | SnapKV, 0.875 | 69.7 8.0 3.6 14.1 6.2 0.8 11.6 11.4 55.1 47.7 79.2 19.4 22.3 26.9
    | StreamingLLM, 0.875 | 11.2 13.8 14.3 18.8 15.2 12.5 13.4 14.0 20.7 56.1 78.1 21.0 18.8 23.7
    | LagKV, 0.875 | 99.3 62.3 3.6 56.2 0.0 0.8 60.2 50.6 93.0 18.8 55.2 29.0 22.3 42.4
    """,
)
TABLE_3 = published(
    "Table 3",
    "LongBench by group, and the 64-digit pass key (partial match)",
    _GROUPS,
    """
    Llama-3.1-8B-Instruct | FullKV | 40.71 37.90 28.29 68.49 68.00 58.70 47.44 99.44
    | L=1024, r=2x | 39.42 37.12 27.38 67.71 68.50 58.83 46.74 99.27
    | L=1024, r=4x | 37.06 36.77 26.79 66.96 63.50 58.42 45.54 96.57
    | L=1024, r=6x | 35.74 36.08 26.33 66.33 60.50 57.91 44.65 91.77
    | L=1024, r=8x | 35.49 35.99 25.90 65.21 61.00 57.95 44.31 86.26
    | L=512, r=2x | 39.43 37.45 27.35 67.82 67.50 58.66 46.73 97.02
    | L=512, r=4x | 37.39 36.27 26.19 66.56 62.50 57.86 45.16 85.73
    | L=512, r=6x | 34.95 35.62 25.52 65.87 59.50 58.14 44.11 75.67
    | L=512, r=8x | 34.03 36.12 25.25 64.94 56.00 57.50 43.47 68.25
    | L=128, r=2x | 38.56 36.80 27.20 67.64 68.00 59.27 46.48 92.76
    | L=128, r=4x | 36.66 36.58 25.62 66.78 66.50 57.90 45.28 73.41
    | L=128, r=6x | 34.57 35.41 24.59 63.59 64.00 56.97 43.49 38.48
    | L=128, r=8x | 33.78 34.60 23.91 62.21 61.50 55.68 42.42 25.01
    Qwen-2.5-7B-Instruct | FullKV | 41.62 45.00 26.41 68.91 100.00 63.60 51.53 100.00
    | L=1024, r=2x | 39.80 42.85 26.11 67.66 99.50 63.12 50.33 99.75
    | L=1024, r=4x | 36.92 40.39 24.81 65.91 95.00 61.60 48.15 96.98
    | L=1024, r=6x | 35.77 39.74 24.68 65.28 93.50 61.45 47.52 77.47
    | L=1024, r=8x | 34.60 39.10 24.18 64.74 90.50 61.30 46.73 66.88
    | L=512, r=2x | 38.72 42.79 25.91 67.98 98.50 62.00 49.91 97.07
    | L=512, r=4x | 35.42 39.12 24.49 64.59 94.00 60.16 47.01 75.89
    | L=512, r=6x | 34.00 38.04 23.72 64.31 87.50 58.80 45.69 42.70
    | L=512, r=8x | 32.14 37.83 23.11 63.48 82.50 58.71 44.64 30.00
    | L=128, r=2x | 38.67 42.49 25.69 67.75 99.00 60.64 49.61 65.93
    | L=128, r=4x | 34.47 39.78 24.07 65.13 96.00 58.67 46.91 20.83
    | L=128, r=6x | 32.83 38.15 22.95 62.23 90.50 56.25 44.76 16.18
    | L=128, r=8x | 32.47 37.10 22.20 60.24 88.50 56.10 43.78 15.07
    """,
)
_SWEEP = {
    f"L={lag}, r={times}x": Entry(f"lagkv:lag={lag},partition_ratio={kept}")
    for lag in LAGS
    for times, kept in _TIMES.items()
}
_VARIANTS = {
    f"{label}, r={times}x": Entry(f"lagkv:lag=32,{variant}partition_ratio={_TIMES[times]}")
    for label, variant in {"LagKV": "", "LocalKV": "variant=local,", "L2 norm": "variant=l2,"}.items()
    for times in (2, 4, 8)
}

PAPER = Paper(
    name="lagkv",
    title="LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
    arxiv="2504.04704",
    studies=(
        Study(
            "ruler",
            "Tables 1 and 2: RULER by fraction removed, the question unknown to the compression",
            NEEDLES,
            {
                f"{label}, {removed:g}": Entry(policy, 1 - removed)
                for removed in (0.25, 0.5, 0.75, 0.875)
                for label, policy in {
                    "SnapKV": "snapkv",
                    "StreamingLLM": "streamingllm",
                    "LagKV": "lagkv:lag=32",
                }.items()
            },
            ("SnapKV, 0.5", "StreamingLLM, 0.5", "LagKV, 0.5"),
            "Four of the 13 tasks, 1,024 tokens and lag 32 in place of 16K tokens and lag 128, so the average is not "
            "the paper's.",
            full="FullKV",
        ),
        Study(
            "sweep",
            "Table 3 and Figure 2: partitions of L tokens of which 1 / r stay",
            NEEDLES,
            _SWEEP,
            (),
            "Lags an eighth of the paper's and less, because a short prompt has to hold two of them.",
            full="FullKV",
        ),
        Study(
            "chunked",
            "Figures 3 and 4: first tokens that are the full cache's, the prompt read whole and in chunks",
            NEEDLES,
            {
                f"{way}, r={times}x": Entry(f"lagkv:lag=32,prefill={way},partition_ratio={_TIMES[times]}")
                for way in ("whole", "chunked")
                for times in (2, 8)
            },
            (),
            "Here the question comes after the compression and so sees what is left, however the prompt was read; in "
            "the paper it is part of the prompt, and a prompt read whole has the full cache's first token.",
            full="FullKV",
        ),
        Study(
            "passkey",
            "Figures 5 to 10: 64-digit pass keys, LagKV, LocalKV and the norm of keys",
            PASSKEY,
            _VARIANTS,
            (),
            "The figures have no numbers. Short backgrounds, and lag 32 in place of 1,024.",
            full="FullKV",
        ),
        Study(
            "longbench",
            "Table 3 on LongBench, one data set of each group",
            LONGBENCH,
            {label: cache for label, cache in _SWEEP.items() if label.startswith("L=64")},
            (),
            "Few questions of six data sets, and short lags.",
            full="FullKV",
        ),
    ),
    published=(TABLE_1, TABLE_2, TABLE_3),
    missing=(
        "RULER at 16K tokens: `kvjax eval --suite ruler --length 16384 --policies snapkv,streamingllm,lagkv "
        "--retained 0.75,0.5,0.25,0.125 --data DIR` on a model that reads so much gives all columns of Tables 1 and 2.",
    ),
)
