"""The kernel body that each TPU core runs; ``tpu.py`` calls it and checks what it can do.

The loop over blocks is software-pipelined in three stages: scores, softmax, values. An iteration works on three blocks
at once, so that the latencies of one (matrix unit 190 cycles, maximum over lanes 140) are hidden by the others. In the
compiler's schedule an iteration of 512 slots takes 331 cycles on v6e, and 680 without the pipeline (8 queries per head,
D = 128, bfloat16; libtpu 0.0.42).

A block of 2,048 slots keeps a TPU7x's matrix units busy for 384 cycles, and an iteration waits for its last product for
about 250 more, beside the 540 in which memory delivers the block. So there an iteration has two blocks, of one head or
of two: 1,051 cycles where two iterations took 1,278 (libtpu 0.0.50). Four would take 1,907 for four blocks, but need
twice the buffers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.ragged_decode.tpu_copies import Copies
from pallas_kernels.ragged_decode.tpu_refs import STAGES, Refs, Static
from pallas_kernels.ragged_decode.tpu_stages import Item, Stages
from pallas_kernels.softmax import NEG


def kernel(*operands: Any, names: tuple[str, ...], static: Static) -> None:
    """Body for ``pallas_call``: ``names`` maps the operands to fields of :class:`Refs`; "" for none."""
    r = Refs(**{name: ref for name, ref in zip(names, operands, strict=True) if name})
    r.out[...] = jnp.zeros_like(r.out)
    r.lse[...] = jnp.full_like(r.lse, jnp.float32(NEG))
    r.zeros[...] = jnp.zeros_like(r.zeros)
    per_core = lax.div(r.count[0] + jnp.int32(static.cores - 1), jnp.int32(static.cores))
    begin = pl.program_id(0) * per_core
    _Loop(r, static, begin, jnp.minimum(begin + per_core, r.count[0])).run()


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A core's loop over its part of the work list, from block ``begin`` to that before ``end``."""

    r: Refs
    s: Static
    begin: Array
    end: Array

    @property
    def copies(self) -> Copies:
        return Copies(self.r, self.s, self.begin, self.end)

    @property
    def ahead(self) -> int:
        """Blocks whose copies are under way."""
        return self.s.buffers - STAGES * self.s.together

    def run(self) -> None:
        """Fill the ring, and go through the blocks."""
        r, s, begin, end, strips = self.r, self.s, self.begin, self.end, jnp.int32(self.s.strips)
        lax.fori_loop(begin, begin + jnp.int32(s.buffers), lambda w, _: self.copies.clear(w), None)
        lax.fori_loop(begin, begin + jnp.int32(self.ahead), lambda w, _: self.copies.start(w), None)
        carry = self._first_carry()
        last = jnp.where(begin < end, self._iterations() + jnp.int32(STAGES - 1), begin * strips)
        lax.fori_loop(begin * strips, last, self._iteration, carry)
        if r.logits is not None:
            for number in self._numbers(last - jnp.int32(STAGES)):
                pl.when((begin < end) & (number < end))(lambda w=number: self.copies.logits_copy(w).wait())

    def _first_carry(self) -> tuple[Array, ...]:
        """The carry of the first iteration, for results of those before it; nothing of what waits in memory."""
        r, s = self.r, self.s
        group, lanes = r.zeros.shape[0], r.q.shape[2]
        # Loaded from memory: a constant would have a replicated layout, which the loop cannot carry as a vector.
        zeros = r.zeros[...]
        scores = jnp.full((group, s.rows), jnp.float32(NEG))
        weights, acc = jnp.zeros((r.q.shape[1], s.rows), jnp.bfloat16), jnp.zeros((group, lanes), jnp.float32)
        waiting = () if s.waiting else (scores, weights)
        for i in range(s.together if s.waiting else 0):
            r.scores[i], r.weights[i] = scores, weights
        state = () if s.in_memory else (*(zeros, zeros + jnp.float32(NEG), zeros) * s.together, acc)
        return *waiting, *state

    def _iteration(self, t: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """One iteration: copies, then the stages, the last one first; each works on blocks of its own."""
        s = self.s
        if s.strips == 1:
            for number in self._numbers(t):
                self._copy(number)
        else:
            pl.when((t & jnp.int32(s.strips - 1)) == 0)(lambda: self._copy(s.block(t)))
        newest, middle, oldest = (self._items(t, stage) for stage in range(STAGES))
        stages = Stages(self.r, s, self.begin)
        scores, weights, *state = (None, None, *carry) if s.waiting else carry
        # Of each block decay, peak and mass, and the sum of values; nothing where they are in memory.
        passed: list[Array] = state[:-1]
        acc: Any = state[-1] if state else None
        for i, item in enumerate(oldest):
            acc = stages.values(item, weights, *passed[3 * i : 3 * i + 3], *([acc] if state else ()))
        state = passed[-2:]
        passed = []
        for item in middle:
            peak, mass, decay, weights = stages.softmax(item, scores, *state)
            passed += [decay, peak, mass]
            state = state and [peak, mass]
        for item in newest:
            scores = stages.scores(item)
        waiting: tuple[Any, ...] = () if s.waiting else (scores, weights)
        return *waiting, *((*passed, acc) if state else ())

    def _copy(self, w: Array) -> None:
        """The copies of a new block: begin that of a later one, wait for its own, and send scores off."""
        self.copies.start(w + jnp.int32(self.ahead))
        self.copies.wait(w)
        if self.r.logits is not None:
            self.copies.send(w)

    def _numbers(self, t: Array) -> list[Array]:
        """The list's items that an iteration begins with; the list may end before."""
        if self.s.together == 1:
            return [t]
        first = self.begin + (t - self.begin) * jnp.int32(self.s.together)
        return [first + jnp.int32(i) for i in range(self.s.together)]

    def _items(self, t: Array, stage: int) -> list[Item]:
        """The items that a stage of an iteration works on; stage 0 on the newest.

        The first two iterations have nothing for the last stage, and the last two nothing for the first. They use the
        list's first or last block instead, and their results are overwritten or not used.
        """
        strips, back = jnp.int32(self.s.strips), jnp.int32(stage * self.s.together)
        begin, end = self.begin, self.end
        items = []
        for place, newest in enumerate(self._numbers(t)):
            number = newest - back
            past = number >= end if self.s.waiting else None
            items.append(Item(jnp.clip(number, begin * strips, end * strips - 1), number, place, past))
        return items

    def _iterations(self) -> Array:
        """The iteration after the last that has a new block."""
        begin, end = self.begin, self.end
        if self.s.together == 1:
            return end * jnp.int32(self.s.strips)
        count = end - begin + jnp.int32(self.s.together - 1)
        return begin + lax.shift_right_logical(count, jnp.int32(self.s.together.bit_length() - 1))
