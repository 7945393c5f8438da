"""Metrics of one answer against its references, each from 0 to 1, as the benchmarks' own code counts them."""

from __future__ import annotations

import difflib
import functools
import re
import string
from collections import Counter
from collections.abc import Sequence

from kvjax.errors import KvjaxError, missing_extra
from kvjax.eval.suites.rouge import rouge_l

#: Punctuation of Chinese text, and of English text.
CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜"
    "＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰"
    "〾〿–—‘’‛“”„‟…‧﹏."
)
PUNCTUATION = string.punctuation


def normalised(text: str, article: str = " ") -> str:
    """Lower case, without punctuation, articles (replaced by ``article``) and more than single spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", article, text).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """The F-measure of two bags of tokens."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """SQuAD's F1 of normalised words."""
    return token_f1(normalised(prediction).split(), normalised(reference).split())


@functools.cache
def _jieba() -> object:
    try:
        import warnings

        with warnings.catch_warnings():  # its regular expressions were written for an older Python
            warnings.simplefilter("ignore")
            import jieba  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise KvjaxError(missing_extra("Chinese answers are cut into words by the package jieba", "eval")) from error
    jieba.setLogLevel(60)  # it tells how long its dictionary took
    return jieba


def need_chinese() -> None:
    """Refuse before anything runs where Chinese cannot be scored."""
    _jieba()


def chinese_words(text: str) -> list[str]:
    """Words of Chinese text, by the package ``jieba``."""
    return list(_jieba().cut(text, cut_all=False))  # pyright: ignore[reportAttributeAccessIssue]


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 of Chinese words without punctuation."""

    def words(text: str) -> list[str]:
        marks = {*string.punctuation, *CHINESE_MARKS}
        bare = ("".join(char for char in word.lower() if char not in marks) for word in chinese_words(text))
        return [joined for word in bare if (joined := "".join(word.split()))]

    return token_f1(words(prediction), words(reference))


def rouge_l_zh(prediction: str, reference: str) -> float:
    """ROUGE-L of Chinese words."""
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of class names in the answer, if the right one is among them.

    Names that are part of the right one do not count. They are taken out while the list is walked through, as the
    benchmark does: the name after one that was taken out is passed over.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def count_share(prediction: str, reference: str) -> float:
    """The fraction of the answer's whole numbers that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def paragraph_share(prediction: str, reference: str) -> float:
    """The fraction of the answer's whole numbers that are the number of the reference, ``Paragraph 3`` or ``段落3``."""
    wanted = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return count_share(prediction, wanted[1]) if wanted else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Similarity of the reference and the answer's first line without a backtick, ``#`` or ``//``, in hundredths.

    It is ``fuzz.ratio`` of the package fuzzywuzzy with Python's own matcher, which is what LongBench requires.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def first_line(prediction: str) -> str:
    """The first line that is not empty."""
    return prediction.lstrip("\n").split("\n")[0]


def contains(prediction: str, reference: str) -> float:
    """1 where the normalised answer contains the normalised reference."""
    wanted = normalised(reference, "")
    return float(bool(wanted) and wanted in normalised(prediction, ""))


def longest_run(prediction: str, reference: str) -> float:
    """The length of the longest piece of the reference that the answer holds, over the reference's."""
    matcher = difflib.SequenceMatcher(None, reference, prediction, autojunk=False)
    return matcher.find_longest_match(0, len(reference), 0, len(prediction)).size / len(reference)


def option_letter(prediction: str) -> str | None:
    """The option A to D that an answer names as LongBench v2 asks for it, or None."""
    plain = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return found[1] if found else None
