"""Buckets: the few static sizes that all prompts, answers and batches share, so that a new request compiles nothing."""

from __future__ import annotations

from kvjax.cache.pool import PAGE_SIZE, pages_for
from pallas_kernels import dispatch
from pallas_kernels.cpu import library

#: Tokens of prompt one iteration of the prefill loop takes; larger buckets are multiples of it.
BLOCK = 256
#: The most that one takes on an accelerator, where fewer rows would wait for the weights: a v5e does 240 operations in
#: the time its memory takes for a byte, so a bfloat16 weight is paid for by 240 tokens and free at several times that.
ACCELERATOR_BLOCK = 1024
#: Tokens of prompt that a block takes on a CPU in the shortest buckets, and tokens of all rows that one product takes.
#: XLA's products multiply padding: so few that compute follows a short prompt (up to 32 tokens are read in 0.6 of the
#: time of a block of 64). Ours skip it: so many that weights are copied seldom, and the rest is still in the caches
#: (against the others, 30 layers, 2 cores: one prompt of 120 tokens 0.85 of the time, 8 of them 0.8, 8 of 1,024 0.95).
SHORT_BLOCK, TOGETHER = 32, 256
NATIVE_SHORT_BLOCK, NATIVE_TOGETHER = 128, 512
#: Rows that they multiply or skip together, at most: ``kRows`` of their C++.
_ROWS_SKIPPED = 8
#: The smallest step of buckets, which all of them are multiples of.
STEP = 64
#: Tokens that the two smallest buckets of a request hold.
SHORT, MEDIUM = 256, 2048
#: Tokens a conversation reserves for later turns, over all rows of a batch together; see :func:`reserves`.
RESERVE = 4096
#: Tokens that may be decoded before a growing cache is repacked; each repacking makes it four times larger.
NEW_TOKENS = 256


def prompt_bucket(tokens: int) -> int:
    """The smallest bucket that holds ``tokens``: a padded block costs nothing but memory, as the loop skips it.

    Steps are 64 up to 256, 256 up to 2,048, then an eighth of the power of two below: at most 64, 256 or 14 % more.
    """
    if tokens <= BLOCK:
        return max(STEP, -(-tokens // STEP) * STEP)
    step = max(BLOCK, 1 << ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def request_bucket(tokens: int) -> int:
    """The bucket of a single request: 256, 2,048, then those of :func:`prompt_bucket`.

    A call answers once what it compiles, so its buckets are few; a job of many rows pays for finer ones.
    """
    return SHORT if tokens <= SHORT else max(MEDIUM, prompt_bucket(tokens))


def own_bucket(tokens: int) -> int:
    """The bucket of what a row adds to a context that it shares: 64, 256, then those of :func:`prompt_bucket`.

    Finer than :func:`request_bucket`, since every row has one, beside what all of them hold once.
    """
    return prompt_bucket(tokens) if tokens <= STEP else max(SHORT, prompt_bucket(tokens))


def reserves(tokens: int, reserve: int, *, outgrown: bool) -> tuple[int, ...]:
    """Tokens of later turns to reserve in a row beside ``tokens``: what is wanted, then less where that does not fit.

    A conversation that has ``outgrown`` its allocation gets half of what it has seen, and ``reserve`` at least:
    allocations grow geometrically, so that up to a context of 131,072 tokens they are 8. Of a reserve of none that is
    none.
    """
    return tuple(dict.fromkeys((max(reserve, tokens // 2), reserve))) if outgrown and reserve else (reserve,)


def batch_bucket(rows: int) -> int:
    """Rows that a request of so many runs as: 1, 4, or a multiple of 8; rows of padding end at once."""
    return rows if rows == 1 else 4 if rows <= 4 else -(-rows // 8) * 8


def rows_together(rows: int, block: int) -> int:
    """Rows of a batch that one product of a prefill takes, a divisor of ``rows``: as few as fill the machine.

    The fewer they are, the less a short row waits for a long one.
    """
    if dispatch.platform() != "cpu":
        most = ACCELERATOR_BLOCK
    else:
        most = NATIVE_TOGETHER if library.at_hand() else min(TOGETHER, 4 * block)
    return next(n for n in range(rows, 0, -1) if rows % n == 0 and (n == 1 or n * block <= most))


def block_of(bucket: int) -> int:
    """The prefill block of a bucket: a part of it that divides it, larger off the CPU."""
    if dispatch.platform() == "cpu":
        short = NATIVE_SHORT_BLOCK if library.at_hand() else SHORT_BLOCK
        return min(bucket, short if bucket in (STEP, SHORT) else BLOCK)
    if bucket <= BLOCK:
        return bucket
    block = ACCELERATOR_BLOCK
    while block > BLOCK and bucket % block:
        block //= 2
    return block


def rows_multiplied(tokens: int, bucket: int) -> int:
    """Rows that products of a prefill multiply for so many tokens: whole blocks, or what is not skipped of them."""
    together = _ROWS_SKIPPED if dispatch.platform() == "cpu" and library.at_hand() else block_of(bucket)
    return -(-tokens // together) * together


def keys_of(bucket: int) -> int:
    """Keys of one product of the XLA forms in a prefill of such a bucket: they bound the scores that are alive."""
    return min(bucket, BLOCK)


def new_bucket(tokens: int, context: int) -> int:
    """Capacity for decoded tokens after a repacking, given how many are in: never more than the model's context."""
    capacity = NEW_TOKENS
    while capacity <= tokens:
        capacity *= 4
    return capacity if capacity == NEW_TOKENS else min(capacity, context)


def slots_of(tokens: int) -> int:
    """Tokens rounded up to whole pages."""
    return pages_for(tokens) * PAGE_SIZE
