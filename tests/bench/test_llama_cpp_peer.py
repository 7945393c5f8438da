"""The peer in llama.cpp: what it asks of llama-cpp-python, and, where that is installed, the same tokens as ours."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types

import numpy as np
import pytest
from support import gguf_files

from kvjax.errors import KvjaxError, UsageError

MODULE = "kvjax.bench.llama_cpp_peer"
VOCABULARY = 50


class Batch(ctypes.Structure):
    """``llama_batch`` of llama.h."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def batch_init(count: int, embedding: int, sequences: int) -> Batch:
    assert (embedding, sequences) == (0, 1)
    made = Batch(n_tokens=0)
    for name, kind in (("token", ctypes.c_int32), ("pos", ctypes.c_int32), ("n_seq_id", ctypes.c_int32)):
        setattr(made, name, (kind * count)())
    made.logits = (ctypes.c_int8 * count)()
    made.seq_id = (ctypes.POINTER(ctypes.c_int32) * count)(*((ctypes.c_int32 * 1)() for _ in range(count)))
    return made


class Context:
    """A sequence's tokens by position; the next one is the sum of them all, and of a prime for each position."""

    def __init__(self, settings: types.SimpleNamespace):
        self.settings = settings
        self.tokens = [{} for _ in range(settings.n_seq_max)]
        self.logits: dict[int, ctypes.Array] = {}

    def decode(self, batch: Batch) -> int:
        if batch.n_tokens > self.settings.n_batch:
            return -1
        self.logits = {}
        for i in range(batch.n_tokens):
            assert batch.n_seq_id[i] == 1
            held = self.tokens[batch.seq_id[i][0]]
            assert batch.pos[i] == len(held), "positions of a sequence follow each other"
            if len(held) == self.settings.n_ctx // self.settings.n_seq_max:
                return 1
            held[batch.pos[i]] = batch.token[i]
            if batch.logits[i]:
                self.logits[i] = (ctypes.c_float * VOCABULARY)()
                self.logits[i][next_token(list(held.values()))] = 1.0
        return 0

    def remove(self, row: int, begin: int, end: int) -> bool:
        assert end == -1
        self.tokens[row] = {at: token for at, token in self.tokens[row].items() if at < begin}
        return True


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) + 7 * len(tokens)) % VOCABULARY


@pytest.fixture
def fake(monkeypatch):
    """The functions of llama-cpp-python that the peer calls, by their names and arguments there."""
    made, freed = [], []
    fake = types.ModuleType("llama_cpp")
    fake.llama_backend_init = lambda: None
    fake.llama_model_default_params = lambda: types.SimpleNamespace(n_gpu_layers=-1)
    fake.llama_model_load_from_file = lambda path, settings: None if path.endswith(b"bad.gguf") else "model"
    fake.llama_model_free = fake.llama_free = freed.append
    fake.llama_model_get_vocab = lambda model: "vocabulary"
    fake.llama_vocab_n_tokens = lambda vocabulary: VOCABULARY
    fake.llama_context_default_params = lambda: types.SimpleNamespace(n_ctx=512, n_batch=2048, kv_unified=True)

    def init(model, settings):
        made.append(Context(settings))
        return made[-1]

    fake.llama_init_from_model = init
    fake.llama_batch_init, fake.llama_batch_free = batch_init, lambda batch: freed.append("batch")
    fake.llama_decode = lambda context, batch: context.decode(batch)
    fake.llama_get_logits_ith = lambda context, index: ctypes.cast(
        context.logits[index], ctypes.POINTER(ctypes.c_float)
    )
    fake.llama_get_memory = lambda context: context
    fake.llama_memory_seq_rm = lambda memory, row, begin, end: memory.remove(row, begin, end)
    fake.llama_state_seq_get_size = lambda context, row: 10 * len(context.tokens[row])
    fake.contexts, fake.freed = made, freed
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield fake
    sys.modules.pop(MODULE, None)


@pytest.fixture
def path(tmp_path):
    return str(gguf_files.write_case(gguf_files.case("llama_gqa"), tmp_path / "small.gguf"))


def test_rows_are_sequences_of_their_own_and_steps_can_be_repeated(fake, path):
    from kvjax.bench.llama_cpp_peer import LlamaCppPeer
    from kvjax.bench.machine import usable_cores

    peer = LlamaCppPeer(path, steps=3)
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (4, 9))
    np.testing.assert_array_equal(peer.next_tokens(prompts), [next_token(row) for row in prompts.tolist()])
    assert peer.prefill_seconds(prompts) > 0
    cache = peer.filled_cache(2, 20)
    assert peer.nbytes(cache) == 2 * 20 * 10
    held = fake.contexts[-1]
    seen = []
    for _ in range(2):
        assert peer.decode_seconds(cache, 2, 20, 3) > 0
        assert [len(row) for row in held.tokens] == [23, 23]
        seen.append([list(row.values()) for row in held.tokens])
    assert seen[0] == seen[1]
    for row in seen[0]:  # greedy: each token after the first is the one that the tokens before it give
        assert row[20] == 1 and all(row[at] == next_token(row[:at]) for at in (21, 22))
    settings = held.settings
    assert (settings.n_seq_max, settings.n_ctx, settings.kv_unified) == (2, 512, False)
    assert settings.n_threads == settings.n_threads_batch == usable_cores()
    del cache, peer, held
    assert "model" in fake.freed and fake.freed.count("batch") == len(fake.contexts)


def test_what_it_cannot_do_is_one_sentence(fake, path, tmp_path):
    from kvjax.bench.llama_cpp_peer import LlamaCppPeer

    with pytest.raises(UsageError, match="reads the model's own GGUF"):
        LlamaCppPeer(str(gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m")), 2)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(KvjaxError, match="cannot load"):
        LlamaCppPeer(str(tmp_path / "bad.gguf"), 2)
    peer = LlamaCppPeer(path, steps=2)
    cache = peer.filled_cache(1, 8)
    fake.llama_decode = lambda context, batch: 1
    with pytest.raises(KvjaxError, match="llama_decode returned 1"):
        peer.decode_seconds(cache, 1, 8, 2)
    fake.llama_memory_seq_rm = lambda *_: False
    with pytest.raises(KvjaxError, match="cannot cut"):
        peer.decode_seconds(cache, 1, 8, 2)
    fake.llama_init_from_model = lambda *_: None
    with pytest.raises(KvjaxError, match="cannot make a cache for 2 rows of 9 tokens"):
        peer.prefill_seconds(np.ones((2, 9), np.int64))
    del fake.llama_get_memory
    with pytest.raises(KvjaxError, match="needs a later llama-cpp-python: this one has no llama_get_memory"):
        LlamaCppPeer(path, 2)


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is never needed")
def test_the_default_model_goes_on_as_in_llama_cpp():
    import kvjax
    from kvjax.bench.llama_cpp_peer import LlamaCppPeer
    from kvjax.checkpoints.hub import is_cached

    if not is_cached("smollm2-135m-instruct"):
        pytest.skip("the model is not in the cache")
    lm = kvjax.load("smollm2-135m-instruct", weights="file")
    texts = ["The capital of France is", "One, two, three, four,", "Water is made of hydrogen and"]
    prompts = [lm.tokenizer.encode(text)[:5] for text in texts]
    peer = LlamaCppPeer(lm.name, steps=1)
    ours = kvjax.generate(lm, prompts, max_new_tokens=1, chat=False)
    assert peer.next_tokens(np.asarray(prompts)).tolist() == [output.tokens[0] for output in ours]
