"""Length buckets: the few static sizes that all prompts and answers share, so that a new prompt does not recompile."""

from __future__ import annotations

from kvjax.cache.pool import PAGE_SIZE, pages_for
from pallas_kernels import dispatch

#: Tokens of prompt one iteration of the prefill loop takes; larger buckets are multiples of it.
BLOCK = 256
#: The most that one takes on an accelerator, where fewer rows would wait for the weights: a v5e does 240 operations in
#: the time its memory takes for a byte, so a bfloat16 weight is paid for by 240 tokens and free at several times that.
ACCELERATOR_BLOCK = 1024
#: Tokens that may be decoded before a growing cache is repacked; each repacking makes it four times larger.
NEW_TOKENS = 256


def prompt_bucket(tokens: int) -> int:
    """The smallest bucket that holds ``tokens``: a padded block costs nothing but memory, as the loop skips it.

    Steps are 64 up to 256, 256 up to 2,048, then an eighth of the power of two below: at most 64, 256 or 14 % more.
    """
    if tokens <= BLOCK:
        return max(64, -(-tokens // 64) * 64)
    step = max(BLOCK, 1 << ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def block_of(bucket: int) -> int:
    """The prefill block of a bucket: the bucket itself when it is short; else what divides it, larger off the CPU."""
    if bucket <= BLOCK or dispatch.platform() == "cpu":
        return min(bucket, BLOCK)
    block = ACCELERATOR_BLOCK
    while block > BLOCK and bucket % block:
        block //= 2
    return block


def keys_of(block: int) -> int:
    """Keys that one product of the XLA forms takes in a prefill of such blocks: it bounds the scores that are alive."""
    return min(block, BLOCK)


def new_bucket(tokens: int, context: int) -> int:
    """Room for decoded tokens after a repacking, given how many are in: never for more than the model's context."""
    room = NEW_TOKENS
    while room <= tokens:
        room *= 4
    return room if room == NEW_TOKENS else min(room, context)


def slots_of(tokens: int) -> int:
    """Tokens rounded up to whole pages."""
    return pages_for(tokens) * PAGE_SIZE
