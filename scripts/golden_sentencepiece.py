"""Ask SentencePiece and transformers for the golden token ids that GGUF's SentencePiece vocabularies are compared with.

Needs sentencepiece and transformers; nobody needs it to install, run or test kvjax. From the repository:

    python scripts/golden_sentencepiece.py               # tests/golden/sentencepiece.json

Two small vocabularies are trained as those of Llama 2 and of Gemma were: BPE with byte fallback, digits apart, Llama's
with a space before the text, Gemma's with line ends and runs of spaces as pieces of their own. For each the file has
its ``pieces``, ``scores`` and ``kinds``, whether a space is put before the text, and ``texts`` with their ids, in which
SentencePiece and transformers' tokenizer of the same model agree.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import types

import sentencepiece
import transformers
from sentencepiece import sentencepiece_model_pb2 as protobuf
from transformers.convert_slow_tokenizer import LlamaConverter

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import golden_texts  # noqa: E402

OUT = ROOT / "tests" / "golden" / "sentencepiece.json"
COMMON = dict(
    model_type="bpe", byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True,
    remove_extra_whitespaces=False, normalization_rule_name="identity", character_coverage=0.98, minloglevel=2,
    num_threads=1,
)  # fmt: skip
RUNS = ["\n" * count for count in range(2, 8)] + ["\u2581" * count for count in range(2, 36)]
MODELS = {
    "llama": dict(vocab_size=520, add_dummy_prefix=True),
    "gemma": dict(
        vocab_size=600, add_dummy_prefix=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        control_symbols=["<start_of_turn>", "<end_of_turn>"], user_defined_symbols=["\n", *RUNS, "<h1>", "</h1>"],
    ),
}  # fmt: skip


def train(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A model of that kind, trained on the golden texts."""
    lines = [
        line for text in (golden_texts.PROSE, golden_texts.CODE, *golden_texts.STRINGS) for line in text.split("\n")
    ]
    (folder / "text.txt").write_text("\n".join(line for line in lines if line and "\0" not in line), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), **COMMON, **MODELS[name]
    )
    return folder / "tokenizer.model"


def golden(name: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as place:
        path = train(name, pathlib.Path(place))
        processor, model = sentencepiece.SentencePieceProcessor(model_file=str(path)), protobuf.ModelProto()
        model.ParseFromString(path.read_bytes())
        if name == "llama":
            other = transformers.LlamaTokenizer.from_pretrained(place).backend_tokenizer
            # As in the tokenizer.json of Llama 2: a space is put before the text, also where it begins with one.
            made_from = types.SimpleNamespace(original_tokenizer=types.SimpleNamespace(legacy=True))
            other.normalizer = LlamaConverter.normalizer(made_from, model)
            other.pre_tokenizer = LlamaConverter.pre_tokenizer(made_from, "\u2581", True)
        else:
            other = transformers.GemmaTokenizer.from_pretrained(place).backend_tokenizer
        texts = []
        for text in (*golden_texts.STRINGS, golden_texts.PROSE, golden_texts.CODE, "<h1> a\n\n\n   b</h1>\n"):
            ids = processor.encode(text)
            assert ids == other.encode(text, add_special_tokens=False).ids, (name, text)
            texts.append({"text": text, "ids": ids})
    pieces = model.pieces
    return {
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "pieces": [piece.piece for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "kinds": [piece.type for piece in pieces],
        "texts": texts,
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps({name: golden(name) for name in MODELS}, ensure_ascii=False) + "\n", encoding="utf-8")
    print(OUT)
