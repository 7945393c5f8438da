"""Round Attention (Tang et al. 2025)."""

from __future__ import annotations

from kvjax.eval.papers.paper import Paper, published

TABLE_1 = published(
    "Table 1",
    "ShareGPT by class of rounds; scores by a judge, of 10",
    "Flash, top-k, Fixed, Adaptive",
    """
    Qwen2.5-3B | mini, score | 7.51 7.5 7.33 7.5
    | mini, tokens | 809 515 560 515
    | small, score | 7.49 7.47 7.48 7.5
    | small, tokens | 4339 1245 1245 1245
    | medium, score | 7.42 7.5 7.5 7.48
    | medium, tokens | 11491 1276 1089 1089
    | large, score | 7.49 7.46 7.43 7.4
    | large, tokens | 19548 2343 1142 1639
    | average score | 7.477 7.483 7.435 7.470
    """,
)
TABLE_2 = published(
    "Table 2",
    "ShareGPT, top-k; scores by a judge, and tokens",
    "small score, small tokens, medium score, medium tokens, large score, large tokens",
    """
    Qwen2.5-0.5B | Flash | 6.39 4339 5.95 11491 5.8 19548
    | Round | 5.74 1245 5.85 1199 6.06 2391
    Qwen2.5-7B | Flash | 7.77 4339 7.8 11491 7.44 19548
    | Round | 7.08 1218 7.49 1382 7.57 2448
    Llama3-8B | Flash | 7.45 4260 4.05 11735 3.01 19812
    | Round | 7.6 1227 3.84 1695 3.47 3376
    Llama3.1-8B | Flash | 7.35 4260 7.11 11735 7.38 19812
    | Round | 7.39 1212 7.17 1369 7.46 2477
    """,
)
TABLE_3 = published(
    "Table 3",
    "LongMemEval, accuracy",
    "Flash, Round",
    """
    Llama3-8B | Single-session-user | 0.2714 0.2857
    | Knowledge-update | 0.4872 0.4744
    | multi-session | 0.1353 0.0977
    | temporal-reasoning | 0.1504 0.1729
    | Single-session-assistant | 0.5357 0.4821
    | Single-session-preference | 0.0 0.0333
    | Accuracy | 0.25 0.242
    Qwen2.5-7B | Single-session-user | 0.1 0.2286
    | Knowledge-update | 0.2821 0.4872
    | multi-session | 0.0376 0.1353
    | temporal-reasoning | 0.0752 0.1429
    | Single-session-assistant | 0.2321 0.4464
    | Single-session-preference | 0.0 0.1333
    | Accuracy | 0.114 0.24
    """,
)
TABLE_4 = published(
    "Table 4",
    "LongMemEval by granularity, accuracy",
    "token, round",
    """
    Llama3.1-8B | Single-session-user | 0.2857 0.2857
    | Knowledge-update | 0.2 0.3333
    | multi-session | 0.1111 0.1111
    | temporal-reasoning | 0.1481 0.1111
    | Single-session-assistant | 0.1818 0.4545
    | Single-session-preference | 0.0 0.0
    | Accuracy | 0.16 0.2
    """,
)
TABLE_5 = published(
    "Table 5",
    "layers, the watershed layer, and the fraction of device memory saved",
    "L, Lw, save ratio",
    """
    Qwen2.5-0.5B | watershed | 24 11 54%
    Qwen2.5-1.5B | watershed | 28 13 54%
    Qwen2.5-3B | watershed | 36 12 67%
    Qwen2.5-7B | watershed | 28 10 64%
    Qwen2.5-14B | watershed | 42 19 55%
    Qwen2.5-72B | watershed | 80 18 78%
    Llama3-8B | watershed | 28 5 82%
    Llama3-70B | watershed | 28 5 82%
    Llama3.2-1B | watershed | 16 5 69%
    Llama3.2-3B | watershed | 28 5 82%
    """,
)

#: Strategies of Table 1, and the granularities of Table 4.
POLICIES = {
    "top-k": "round",
    "Fixed": "round:strategy=fixed",
    "Adaptive": "round:strategy=adaptive",
    "above the mean, rounds": "round:strategy=above_mean",
    "above the mean, tokens": "round:strategy=above_mean,granularity=token",
}
QUICK = ("top-k",)
#: Files of dialogues, the first that there is: questions with gold rounds, then dialogues.
PLACES = (
    "longmemeval/longmemeval_s_cleaned.json",
    "longmemeval/longmemeval_s.json",
    "longmemeval/longmemeval_s_subset.json",
    "longchat/topics_5.jsonl",
)
DIFFERS = (
    "The paper's scores are a judge's; here agreement with the full cache's tokens, and the rounds that hold the "
    "answer. Histories are cut to what the model reads."
)

PAPER = Paper(
    name="round",
    title="Round Attention: A Novel Round-Level Attention Mechanism to Accelerate LLM Inference",
    arxiv="2502.15294",
    studies=(),
    published=(TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5),
    missing=(
        "Tables 1 and 2 by score: a judge of 10 points (GPT-4o) is asked for them.",
        "Figures 2a, 4 and 5 (one dialogue's attention, latency and memory by layer): `kvjax picture question-answer` "
        "and `kvjax compare-rounds --rounds 5,20,50 --picture FILE` draw what this machine can show.",
    ),
)
