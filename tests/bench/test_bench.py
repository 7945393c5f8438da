"""The benchmark on the tiny model: its numbers are the real ones and its report says what they mean."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
import toys

from kvjax.bench import bench_report, machine, measurements
from kvjax.bench.floats_peer import FloatsPeer
from kvjax.policies import parse
from kvjax.runtime.compilation import compile_clock
from kvjax.runtime.synthetic import filled_cache, weight_bytes_per_step

SMALL = 1 << 20


@pytest.fixture(scope="module")
def bench():
    policies = {text: parse(text) for text in ("full", "streamingllm:ratio=0.25")}
    meter = machine.BandwidthMeter(buffer_bytes=SMALL)
    return measurements.Bench(toys.tiny_model(), policies, rounds=2, steps=4, meter=meter)


def test_decode_rows_carry_real_bytes(bench):
    full, ring = bench.decode(batch=2, context=128)
    config = bench.lm.config
    cache = filled_cache(config, parse("full"), 2, 128, jnp.float32)
    assert full.cache_bytes == cache.nbytes
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * 4
    assert full.live_cache_bytes == 128 * token
    assert ring.live_cache_bytes == full.live_cache_bytes // 4
    # Four steps for the peak, then two rounds of four: in the middle of them a row has 134 and 138 tokens.
    weights = weight_bytes_per_step(bench.lm.params)
    assert full.step_bytes == weights + 136 * token
    assert ring.step_bytes == weights + ring.live_cache_bytes
    assert full.tokens_per_second == pytest.approx(2 / full.step_seconds)
    # Two rounds of: read, full, read, ring, read.
    first, between, after, *second = bench.meter.readings[-6:]
    assert full.bandwidths == pytest.approx(((first + between) / 2, (second[0] + second[1]) / 2))
    assert ring.bandwidths == pytest.approx(((between + after) / 2, (second[1] + second[2]) / 2))
    must_read = [weights + tokens * token for tokens in (134, 138)]
    fraction, steady = measurements.limit_fraction(must_read, full.rounds, [(first, between), (second[0], second[1])])
    assert (full.limit_fraction, full.steady_rounds) == (pytest.approx(fraction), steady)


def test_the_share_of_the_limit_is_of_rounds_whose_bandwidth_was_steady():
    around = [(95.0, 105.0), (40.0, 80.0), (50.0, 50.0)]
    assert measurements.limit_fraction((100, 100, 100), (2.0, 1.0, 4.0), around) == (0.5, 2)
    assert measurements.limit_fraction((100, 50, 300), (2.0, 1.0, 4.0), around) == (1.0, 2)  # each round's own bytes
    assert measurements.limit_fraction((60,), (2.0,), [(40.0, 80.0)]) == (0.5, 0)  # no better round, so this one


@pytest.mark.slow
def test_prefill_and_long_rows(bench):
    rows = bench.prefill(100)
    assert [row.candidate for row in rows] == ["full", "streamingllm:ratio=0.25"]
    assert all(row.tokens_per_second == pytest.approx(100 / row.seconds) for row in rows)
    (row,) = bench.long(many=40, few=10)  # Full grows, so only the ring is compared
    assert row.policy == "streamingllm:ratio=0.25"
    assert row.few_cache_bytes == row.many_cache_bytes


def test_weights_read_in_a_step():
    tied, untied = toys.tiny_model(), toys.tiny_model(tie_embeddings=False)
    size = lambda lm: sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))  # noqa: E731
    assert weight_bytes_per_step(tied.params) == size(tied)
    table = untied.params.embedding[...].nbytes
    assert weight_bytes_per_step(untied.params) == size(untied) - table


def test_candidates_take_turns():
    order = []

    def candidate(name):
        return measurements.Candidate(name, lambda: order.append(name) or 1.0)

    times = measurements.interleave([candidate("a"), candidate("b")], 3)
    assert order == ["a", "b"] * 3
    assert times == {"a": (1.0,) * 3, "b": (1.0,) * 3}
    assert measurements.median_ratio((4.0, 9.0, 1.0), (2.0, 3.0, 1.0)) == 2.0


def test_the_bandwidth_meter_reads_its_whole_buffer():
    meter = machine.BandwidthMeter(buffer_bytes=SMALL)
    assert meter.buffer_bytes == SMALL
    assert meter() > 0 and len(meter.readings) == 1


def test_peak_memory_sees_what_is_allocated():
    before = machine.memory_in_use()
    with machine.watch_peak() as watched:
        held = jax.block_until_ready(jnp.ones((1 << 24,), jnp.float32))
        del held
    assert watched.peak - before > 0.9 * (1 << 26)


@pytest.mark.slow
def test_report_as_json_and_markdown(bench, tmp_path):
    rows = bench.decode(batch=1, context=64)
    result = bench_report.Measurements(
        machine=machine.describe(),
        model="tiny",
        dtype="float32",
        bandwidth_buffer_bytes=SMALL,
        weight_bytes_per_step=1,
        bandwidth_readings=bench.meter.readings,
        decode=rows,
    )
    found = bench_report.report(result)
    (tmp_path / "result.json").write_text(found.json())
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["decode"][0]["cache_bytes"] == rows[0].cache_bytes
    assert saved["machine"]["versions"]["jax"] == jax.__version__
    text = found.markdown()
    assert "| batch | context | policy |" in text and "streamingllm:ratio=0.25" in text
    assert "GB/s" in text
    table, *_ = bench_report.tables(result)
    assert table.title == "Prefill and decode" and all(len(row) == len(table.header) for row in table.cells)


@pytest.mark.slow
def test_quantised_weights_are_timed_in_turn_with_floats():
    lm, floats = (toys.tiny_model(weights=weights) for weights in ("int8", None))
    meter = machine.BandwidthMeter(buffer_bytes=SMALL)
    peer = FloatsPeer(floats, steps=2, room=64)
    made = measurements.Bench(lm, {"full": parse("full")}, rounds=2, steps=2, peer=peer, meter=meter)
    int8, other = made.decode(batch=2, context=32)
    assert other.candidate == "floats" and other.speedup_over_peer is None
    assert int8.speedup_over_peer == pytest.approx(measurements.median_ratio(other.rounds, int8.rounds))
    assert other.cache_bytes == filled_cache(floats.config, parse("full"), 2, 32, jnp.float32, new_capacity=64).nbytes
    assert int8.step_bytes < weight_bytes_per_step(floats.params)
    read, slower = made.prefill(32)
    assert read.speedup_over_peer == pytest.approx(measurements.median_ratio(slower.rounds, read.rounds))


def test_floats_are_read_without_what_is_compiled_for_them():
    """The decode table's prefill is one reading, and the first: the quantised model's leaves compilation out too."""
    peer = FloatsPeer(toys.tiny_model(), steps=2, room=64)
    jax.clear_caches()
    with compile_clock() as clock:
        seconds = [peer.prefill_seconds(jnp.zeros((1, 8), int)), clock.seconds]
    assert 0 < seconds[0] < seconds[1], "a toy is read in less time than its programs are compiled"
