"""Text to token ids and back, and chat templates: ``tokenizers`` and ``transformers`` without torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import UsageError, WeightsError, quoted
from kvjax.progress import stage

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

#: The code of a character that Latin-1 does not have.
_NOT_LATIN = 0x100


class Tokenizer:
    """A model's tokenizer.

    Attributes:
      vocab_size: ids run from 0 to ``vocab_size - 1``, as far as the model embeds them; some may be unused.
      special_ids: ids of control tokens, which ``decode`` leaves out.
      chat_template: the template that ``render`` writes messages with, or None.
      special_tokens: tokens by role ("eos_token", "bos_token", ...), as chat templates name them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        wrapper: Callable[[], PreTrainedTokenizerBase] | None = None,
    ):
        """Wrap a ``tokenizers.Tokenizer``; ``wrapper`` gives transformers' view of it, made only for chat templates."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        self._wrapper = wrapper
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._beyond: frozenset[int] = frozenset()

    def to_json(self) -> str:
        """The content of a ``tokenizer.json``, without the chat template; :func:`tokenizer_from_json` reads it."""
        return self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render`` can be used."""
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``: nothing is added, and special tokens written in the text become their ids.

        UsageError for a text with a token that the model does not embed.
        """
        if not isinstance(text, str):
            raise UsageError(f"A text is to be encoded, and {quoted(text)} was given.")
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise UsageError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        if self._beyond and (absent := self._beyond.intersection(ids)):
            token = self._backend.id_to_token(index := min(absent))
            raise UsageError(
                f"The text holds the token {quoted(token)} (id {index:,}), which this model does not embed."
            )
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Token ids of a text that goes on after other text; see :meth:`encode`.

        Some SentencePiece vocabularies begin every text with a space. A text that goes on has none but its own: it is
        encoded behind a line break, whose ids are then left out.
        """
        if not self._begins_with_space:
            return self.encode(text)
        before, both = self.encode("\n"), self.encode("\n" + text)
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)

    @cached_property
    def _begins_with_space(self) -> bool:
        table = self.token_bytes()
        return b"".join(table[index] for index in self.encode("a")).startswith(b" ")

    @property
    def words_end(self) -> int:
        """The id after the last of the vocabulary's own tokens; added ones (images, padding) may have higher ids."""
        added = self._backend.get_added_tokens_decoder()
        own = (index for index in self._backend.get_vocab(with_added_tokens=True).values() if index not in added)
        return max(own, default=-1) + 1

    def embed_only(self, count: int) -> list[str]:
        """Leave out ids from ``count`` on, which a model does not embed; returns their tokens."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        beyond = {index: token for token, index in vocabulary.items() if index >= count}
        self._beyond = frozenset(beyond)
        self.vocab_size = min(self.vocab_size, count)
        self.special_ids = frozenset(index for index in self.special_ids if index < count)
        return [beyond[index] for index in sorted(beyond)]

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids the model expects in front of plain text (a beginning-of-text id, or none); templates bring their own."""
        return tuple(i for i in self._backend.encode("", add_special_tokens=True).ids if i not in self._beyond)

    def special_in(self, text: str) -> tuple[str | None, bool]:
        """A special token that is written in the text, None if there is none, and whether it is all of it."""
        found = [token for token in self._special_texts if token in text]
        return (None, False) if not found else (max(found, key=len), text in found)

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        added = self._backend.get_added_tokens_decoder()
        return tuple(added[index].content for index in sorted(self.special_ids) if added[index].content)

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary; KeyError for another."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids, exactly: spaces are not cleaned up. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's chat template writes it.

        Args:
          messages: dicts with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
          UsageError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise UsageError("The model has no chat template; give it plain text (chat=False) instead of messages.")
        from jinja2 import TemplateError

        try:
            text = self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            # A template is a program that comes with the model: it fails in any way a program can.
            raise UsageError(f"The model's chat template refuses the messages: {error}.") from error
        return str(text)

    @cached_property
    def _chat(self) -> PreTrainedTokenizerBase:
        if self._wrapper is not None:
            return self._wrapper()
        with stage("load", "chat templates"):  # importing what renders them takes the better part of a second
            fast = import_transformers().PreTrainedTokenizerFast
        return fast(tokenizer_object=self._backend, chat_template=self.chat_template, **self.special_tokens)

    def token_bytes(self) -> list[bytes]:
        """The bytes every id adds to the text, indexed by id; nothing for special tokens and unused ids."""
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        added = self._backend.get_added_tokens_decoder()
        out = [b""] * self.vocab_size
        convert = _bytes_of_piece(self._backend)
        for token, index in self._backend.get_vocab(with_added_tokens=True).items():
            if index >= self.vocab_size:
                continue
            if index not in added:
                out[index] = convert(token)
            elif not added[index].special:
                out[index] = added[index].content.encode()
        return out


def _bytes_of_piece(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """The bytes of a vocabulary entry: byte-level (GPT-2) or sentencepiece with byte fallback."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    kinds = {part["type"] for part in state.get("decoders", [state]) if part}
    if "ByteLevel" in kinds:
        # Translation and Latin-1 are C: a Python loop over the characters of a vocabulary takes 0.2 s. What is in no
        # alphabet becomes a character that Latin-1 does not have.
        table = dict.fromkeys(range(256), _NOT_LATIN) | {ord(c): b for c, b in byte_level_alphabet().items()}

        def byte_level(piece: str) -> bytes:
            try:
                return piece.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                return piece.encode()

        return byte_level

    def sentencepiece(piece: str) -> bytes:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    return sentencepiece


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character of every byte: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def import_transformers() -> Any:
    """``transformers``, without its notice that PyTorch is missing: kvjax uses only its tokenizers and templates."""

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "PyTorch was not found" not in text and "None of PyTorch" not in text

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        import transformers
    finally:
        logger.removeFilter(keep)
    return transformers


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises WeightsError when its files are missing or cannot be read.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise WeightsError(f"{folder} holds no tokenizer ({', '.join(names)}).")
    transformers = import_transformers()
    # tokenizer.json says everything; AutoTokenizer (5.23) puts the model type's own splitting and tokens in its place.
    complete = (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if complete else transformers.AutoTokenizer
    try:
        # Code that a folder brings is never run, nor asked about.
        wrapper = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if _is_code(folder):
            raise WeightsError(
                f"The tokenizer in {folder} is Python code, which kvjax does not run; add the tokenizer.json of a "
                "converted copy of the model, or load a GGUF of it."
            ) from error
        # Every tokenizer class fails in its own way on a bad file; the cause stays attached.
        raise WeightsError(f"The tokenizer in {folder} cannot be read: {_first_sentence(error)}.") from error
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is None:
        raise WeightsError(f"The tokenizer in {folder} has no fast form (tokenizer.json), which kvjax needs.")
    template = wrapper.chat_template
    if isinstance(template, Mapping):  # several by name
        template = template.get("default")
    if not isinstance(template, (str, type(None))):
        raise WeightsError(f"The tokenizer in {folder} has a chat template that is no text.")
    special = {role: token for role, token in wrapper.special_tokens_map.items() if isinstance(token, str)}
    return Tokenizer(
        backend,
        chat_template=template,
        special_tokens=special,
        wrapper=lambda: wrapper,
    )


def _is_code(folder: Path) -> bool:
    """Whether a folder's tokenizer is a class that it brings itself (``auto_map``), without a tokenizer.json."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and "auto_map" in settings


def tokenizer_from_json(
    text: str, origin: str, *, chat_template: str | None, special_tokens: dict[str, str]
) -> Tokenizer:
    """The tokenizer that :meth:`Tokenizer.to_json` wrote, with its chat template; WeightsError where it is none."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise WeightsError(f"The tokenizer in {origin} cannot be read: {_first_sentence(error)}.") from error
    return Tokenizer(backend, chat_template=chat_template, special_tokens=special_tokens)


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".: ")
