"""The same GGUF in llama.cpp (llama-cpp-python), timed on the same shapes with as many threads.

llama-cpp-python is never a dependency: this module is imported only when ``--peer llama.cpp`` asks for it. Both sides
read one file; llama.cpp multiplies its blocks as they are stored, and keeps keys and values as float16, its default.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import Any

import numpy as np

from kvjax.bench.machine import usable_cores
from kvjax.checkpoints.hub import fetch
from kvjax.errors import KvjaxError, UsageError

try:
    import llama_cpp
except (ImportError, OSError, RuntimeError) as error:  # the last two are of a shared library that cannot be loaded
    raise KvjaxError(
        "--peer llama.cpp needs llama-cpp-python, which kvjax itself never does; install it beside kvjax and try again."
    ) from error

_NEEDED = ("llama_init_from_model", "llama_get_memory", "llama_memory_seq_rm", "llama_state_seq_get_size")
_CELLS = 256  # llama.cpp gives a sequence a multiple of these


class _Context:
    """A llama.cpp context for ``rows`` sequences of up to ``length`` tokens each, freed with this object.

    Sequences have caches of their own (``kv_unified`` is off), so that a row attends to its own tokens alone.
    """

    def __init__(self, model: _Model, rows: int, length: int):
        self._model, self.rows = model, rows  # the model outlives its contexts
        most = rows * length
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = rows * (-(-length // _CELLS) * _CELLS)
        settings.n_batch = most
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = usable_cores()
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(model.pointer, settings)
        if not self._context:
            raise KvjaxError(f"llama.cpp cannot make a cache for {rows} rows of {length} tokens.")
        weakref.finalize(self, llama_cpp.llama_free, self._context)
        self._batch = llama_cpp.llama_batch_init(most, 0, 1)
        weakref.finalize(self, llama_cpp.llama_batch_free, self._batch)
        view = np.ctypeslib.as_array
        self._token, self._position = view(self._batch.token, (most,)), view(self._batch.pos, (most,))
        self._wanted = view(self._batch.logits, (most,))
        view(self._batch.n_seq_id, (most,))[:] = 1

    def read(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Read token ids, [rows, T] at positions from ``start`` on; the likeliest next ones, [rows]."""
        rows, count = tokens.shape
        total = self._batch.n_tokens = rows * count
        self._token[:total] = tokens.reshape(-1)
        self._position[:total] = np.tile(np.arange(start, start + count), rows)
        self._wanted[:total] = np.tile(np.arange(count) == count - 1, rows)
        for index in range(total):
            self._batch.seq_id[index][0] = index // count
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code != 0:
            raise KvjaxError(f"llama.cpp cannot read {rows} rows of {count} tokens: llama_decode returned {code}.")
        ends = (count - 1 + count * row for row in range(rows))
        return np.array([self._likeliest(end) for end in ends], np.int32)

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._model.vocabulary,)).argmax())

    def cut(self, length: int) -> None:
        """Forget what stands at positions from ``length`` on."""
        memory = llama_cpp.llama_get_memory(self._context)
        if not all(llama_cpp.llama_memory_seq_rm(memory, row, length, -1) for row in range(self.rows)):
            raise KvjaxError("llama.cpp cannot cut this model's cache back, and so cannot repeat its steps.")

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that it holds, as llama.cpp would save them."""
        return sum(llama_cpp.llama_state_seq_get_size(self._context, row) for row in range(self.rows))


class _Model:
    """Weights of a GGUF on the CPU, freed with this object."""

    def __init__(self, path: str):
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # its lines about every tensor
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.pointer: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), settings)
        if not self.pointer:
            raise KvjaxError(f"llama.cpp cannot load {path}.")
        weakref.finalize(self, llama_cpp.llama_model_free, self.pointer)
        self.vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer))


class LlamaCppPeer:
    """Decode and prefill times of llama.cpp on the CPU.

    Args:
      name: what the model was loaded as; it has to be a GGUF. steps: tokens that :meth:`decode_seconds` decodes.

    Raises:
      UsageError: the model is no GGUF.
      KvjaxError: a llama-cpp-python of before mid-2025, or a model that it cannot load.
    """

    name = "llama.cpp"

    def __init__(self, name: str, steps: int):
        path = fetch(name)
        if path.is_dir():
            raise UsageError(
                f"--peer llama.cpp reads the model's own GGUF, and {name} is a folder of another format; give a GGUF."
            )
        lacking = [function for function in _NEEDED if not hasattr(llama_cpp, function)]
        if lacking:
            raise KvjaxError(f"--peer llama.cpp needs a later llama-cpp-python: this one has no {lacking[0]}.")
        self._model, self._steps = _Model(str(path)), steps
        self.about = f"the same GGUF on {usable_cores()} threads, keys and values float16"

    def filled_cache(self, batch: int, context: int) -> _Context:
        """A cache that has read ``context`` random tokens a row."""
        made = _Context(self._model, batch, context + self._steps)
        made.read(np.random.default_rng(0).integers(0, self._model.vocabulary, (batch, context)), 0)
        return made

    def decode_seconds(self, cache: _Context, batch: int, context: int, steps: int) -> float:
        """Seconds of one greedy step, over ``steps`` of them; the cache is cut back to ``context`` before."""
        cache.cut(context)
        tokens = np.ones(batch, np.int32)
        start = time.perf_counter()
        for position in range(context, context + steps):
            tokens = cache.read(tokens[:, None], position)
        return (time.perf_counter() - start) / steps

    def next_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """The likeliest next token of prompts, [B, T] ids."""
        tokens = np.asarray(tokens)
        return _Context(self._model, *tokens.shape).read(tokens, 0)

    def prefill_seconds(self, tokens: np.ndarray) -> float:
        """Seconds until the first next token of a prompt, [B, T] ids."""
        tokens = np.asarray(tokens)
        made = _Context(self._model, *tokens.shape)
        start = time.perf_counter()
        made.read(tokens, 0)
        return time.perf_counter() - start

    @staticmethod
    def nbytes(cache: _Context) -> int:
        """Bytes of the tokens that a cache holds."""
        return cache.nbytes
