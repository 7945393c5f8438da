"""Sizes of a prefill's blocks and products follow what multiplies them."""

from __future__ import annotations

import pytest

from kvjax.cache import buckets


@pytest.fixture(params=[True, False], ids=["C++", "XLA"])
def native(request, monkeypatch):
    """Whether products are C++'s, which skip padding."""
    monkeypatch.setattr(buckets.library, "at_hand", lambda: request.param)
    monkeypatch.setattr(buckets.dispatch, "platform", lambda: "cpu")
    return request.param


def test_blocks_divide_their_buckets_and_are_longer_where_padding_is_skipped(native):
    for bucket in (64, 128, 192, 256, 512, 2048, 2304, 9216):
        assert bucket % buckets.block_of(bucket) == 0
    sizes = [buckets.block_of(bucket) for bucket in (64, 256, 2048)]
    assert sizes == ([64, 128, 256] if native else [32, 32, 256])


def test_rows_that_are_read_together_fill_a_product(native):
    for rows in (1, 4, 8, 24):
        for block in (32, 64, 128, 256):
            together = buckets.rows_together(rows, block)
            assert rows % together == 0 and (together == 1 or together * block <= (512 if native else 256))
    assert [buckets.rows_together(8, block) for block in (32, 128, 256)] == ([8, 4, 2] if native else [4, 2, 1])


def test_rows_of_a_prompt_that_are_multiplied(native):
    counts = [buckets.rows_multiplied(tokens, 256) for tokens in (0, 1, 8, 9, 33)]
    assert counts == ([0, 8, 8, 16, 40] if native else [0, 32, 32, 32, 64])
    assert buckets.rows_multiplied(300, 2048) == (304 if native else 512)
