"""The texts behind the golden values of the default model: tokenizer strings, conversations and three prompts."""

from __future__ import annotations

STRINGS: tuple[str, ...] = (
    "",
    " ",
    "Hello",
    " Hello",
    "Hello, world!",
    "hello world  two  spaces   three",
    "   leading and trailing   ",
    "line one\nline two\n\nline four\n",
    "\n\n\n   \n\t\n",
    "tabs\tand\r\nCRLF\r\n",
    "I'm sure they'll say it's fine; we've seen what you'd do, don't we? SHE'S HERE.",
    "0123456789",
    "3.14159 and 1,000,000 in 2024-10-05T12:34:56Z, v1.2.3-rc4",
    "a1b22c333 x=42;y=-7e-3 0xDEADBEEF 1_000",
    "½ ² Ⅷ ٣ ４２ 九",
    "def add(a: int, b: int) -> int:\n    return a + b  # sum\n\n\nprint(add(1, 2))\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }",
    '{"key": [1, 2.5, null, true], "nested": {"a\\n": "\\u00e9"}}',
    "SELECT * FROM t WHERE name LIKE '%x_%' AND id >= 10;",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\temp\\new",
    "Ünïcödé façade naïve coöperate Straße ŒUVRE İstanbul",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "今日は世界。你好，世界！안녕하세요 세계",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "😀 🎉👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "e\u0301 vs \u00e9, zero\u200bwidth, nb\u00a0space, wide\u3000space, \ufeffbom",
    "∀x∈ℝ: ∑ᵢ xᵢ² ≥ 0 → √(a²+b²) ≠ ∞ — “quoted” … ‘single’",
    "control \x00 \x01 \x1b[0m \x7f end",
    "ALLCAPS mixedCase snake_case kebab-case SCREAMING_SNAKE CamelCaseWord",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "!!! ??? ... --- *** ### @@@ $$$ ((( ))) [[ ]] {{ }} <<< >>> ||| &&& ~~~ ``` ''' \"\"\"",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>text right after<|im_end|> text with a space",
    "<repo_name>kv<file_sep>main.py<jupyter_code>x = 1<empty_output>",
    "almost special: <|im_start> |im_end|> <|im_ end|> < |endoftext|> <||>",
    "word " * 20 + "end",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbb" + "=" * 40 + " " * 33 + ".",
)

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in rhymes."},
        {"role": "user", "content": "Hi!\nWho are you?"},
        {"role": "assistant", "content": "A model, it's true."},
        {"role": "user", "content": "Thanks 😀"},
    ],
)

PROSE = """\
The lighthouse had stood on the point for a hundred and forty years before anyone thought to ask who owned it. The \
county believed that it belonged to the navy, the navy believed that it had been handed over to the coast guard \
sometime after the second war, and the coast guard, when a clerk was finally sent to look through the files, \
discovered a single typed letter which said that the tower and the three acres of rock around it had been given back \
to the family of the first keeper, on the condition that the lamp be kept in working order. Nobody in the family had \
ever seen that letter. They had gone on painting the door every second spring, and oiling the hinges, and carrying \
buckets of clean water up the hundred and nine steps to wash the salt from the glass, because their parents had done \
so, and because in the winter, when the fishing was poor, there was very little else to do. When the clerk arrived, \
one wet afternoon in March, he found an old woman sitting by the stove in the lower room with a radio in her lap, \
mending it with a kitchen knife. He explained, as carefully as he could, that she was in all likelihood the owner of \
a public navigation aid, and that there would be forms. She listened until he had finished. Then she asked whether \
the forms said anything about paint, since the price of paint had doubled, and whether the government, having found \
the letter after all this time, might also be able to find the bell, which a young officer had borrowed in 1943 and \
had promised, on his honour, to bring back before"""

CODE = '''\
# -*- coding: utf-8 -*-
"""Größe & Länge: kleine Hilfsfunktionen – naïve, but tested ✓"""

import math

GREETINGS = {"de": "Grüß Gott", "fr": "Ça va?", "ja": "こんにちは", "ru": "Привет", "emoji": "👋🏽"}


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return (μ, σ) where σ² = Σ(xᵢ − μ)² / (n − 1)."""
    n = len(values)
    if n < 2:
        raise ValueError("need at least 2 values")
    mu = sum(values) / n
    return mu, math.sqrt(sum((x - mu) ** 2 for x in values) / (n - 1))


def median(values: list[float]) -> float:
    """Return the middle value; the mean of the two middle ones if n is even."""
'''


def prompts(render) -> dict[str, str]:
    """The three prompts by name; ``render`` applies the model's chat template to messages."""
    question = "Name three fruits that are red, and say in one short sentence why they are."
    return {"chat": render([{"role": "user", "content": question}]), "prose": PROSE, "code": CODE}
