"""The TPU kernel: interpreted over every shape, with its copies and their races on a few, and lowered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.decode_base import RAGGED, Case, DecodeBase, build, by_row, oracle

from pallas_kernels.ragged_decode import reference, tpu
from pallas_kernels.ragged_decode.worklist import work_list
from pallas_kernels.softmax import NEG
from tools.aot import cases_decode

# The interpreter carries whole rings from turn to turn; small ones still hold several blocks of a head.
SMALL = tpu.TpuConfig(rows=128, buffers=4)
#: Two blocks an iteration, of one head or of two.
TWO = tpu.TpuConfig(rows=128, buffers=8, together=2)
ARRAYS = ("q", "pages", "length", "log_mass", "k_scale", "v_scale", "position", "query_position", "first_row", "starts")


def decode(problem, config=SMALL, interpret=True):
    arrays = {name: getattr(problem, name) for name in ARRAYS}
    return jax.jit(
        lambda arrays: tpu.decode(dataclasses.replace(problem, **arrays), config=config, interpret=interpret),
        # These programs run for milliseconds: what LLVM does for speed would be most of the test's time.
        compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )(arrays)


class TestTpu(DecodeBase):
    layouts = ("stacked", "padded", "lanes")
    narrow = ("registers",)

    def layouts_of(self, case):
        fits = {"stacked": case.head_dim % 128 == 0, "padded": case.head_dim in (80, 96), "lanes": case.head_dim == 64}
        return tuple(name for name in self.layouts if fits[name])

    def fit(self, case):
        streams = case.dtype == jnp.int8 or case.alibi or case.by_position or case.with_logits
        return dataclasses.replace(case, page_size=128) if streams else case

    def run(self, problem):
        # Of pages of 128 a block is two.
        return decode(problem, SMALL if problem.pages.shape[2] < 128 else dataclasses.replace(SMALL, rows=256))

    @pytest.mark.slow
    def test_queries_of_some_rows(self):
        lengths = ((70, 130), (0, 5), (160, 1), (33, 64))
        self.check_rows(Case(lengths, RAGGED, with_logits=True, log_mass=True))
        self.check_rows(Case(lengths, RAGGED, dtype=jnp.int8, alibi=True))

    @pytest.mark.slow
    def test_queries_of_some_rows_of_runs_by_row(self):
        """The starts are of the rows that are asked, the pages of all."""
        lengths = ((70, 130), (0, 5), (160, 1), (33, 64))
        self.check_rows(by_row(lengths, ((5, 16), (11, 10), (20, 1), (3, 18)), with_logits=True, log_mass=True))

    def test_a_block_that_begins_in_its_neighbour_leaves_its_scores_where_runs_are_by_row(self):
        case = by_row(((300, 100, 300), (100, 500, 1)), ((3, 1, 3), (1, 5, 1)), page_size=128, dtype=jnp.int8)
        problem = build(dataclasses.replace(case, with_logits=True), "stacked")
        want, got = oracle(problem), decode(problem, dataclasses.replace(SMALL, rows=512, cores=2))
        np.testing.assert_allclose(got.logits, want.logits, atol=8e-2, rtol=2e-2)
        np.testing.assert_allclose(got.out, want.out, atol=2e-2, rtol=2e-2)

    @pytest.mark.slow
    def test_two_cores_share_the_list(self):
        for config in (dataclasses.replace(SMALL, cores=2), dataclasses.replace(SMALL, cores=2, rows=256)):
            case = Case(((70, 300, 0), (0, 0, 0), (5, 513, 1)), (10, 40, 1), log_mass=True)
            problem = build(case, "stacked")
            want, got = reference.decode(problem), decode(problem, config)
            np.testing.assert_allclose(got.out, want.out, atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(got.lse, want.lse, atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize(
        ("case", "cores"),
        [
            # Odd and even numbers of blocks; heads of one block, of which the list's end has one, and of none.
            (Case(((70, 300, 0), (0, 0, 0), (5, 513, 1)), (10, 40, 1), log_mass=True), 1),
            (Case(((700, 5, 129), (130, 250, 1)), (44, 16, 9), window=200, soft_cap=20.0), 2),
            (Case(((1,),), (1,), group=1), 1),
            (Case(((300, 5),), (3, 1), page_size=128, dtype=jnp.int8, alibi=True, window=300, with_logits=True), 1),
            (by_row(((300, 100), (100, 500)), ((5, 1), (1, 5)), page_size=128, with_logits=True), 2),
        ],
        ids=["odd", "window", "one", "logits", "runs by row"],
    )
    def test_two_blocks_an_iteration(self, case, cores):
        case = case if case.dtype == jnp.int8 else dataclasses.replace(case, dtype=jnp.bfloat16)
        problem = build(case, "stacked")
        wide = dataclasses.replace(problem, q=problem.q.astype(jnp.float32))
        want, got = oracle(wide), decode(problem, dataclasses.replace(TWO, cores=cores))
        np.testing.assert_allclose(np.asarray(got.out, np.float32), want.out, atol=2e-2, rtol=2e-2)
        np.testing.assert_allclose(got.lse, want.lse, atol=2e-2, rtol=2e-2)
        if case.with_logits:
            np.testing.assert_allclose(got.logits, want.logits, atol=8e-2, rtol=2e-2)

    @pytest.mark.slow
    @pytest.mark.parametrize(("runs", "lengths"), [((3,), (300,)), ((5, 1), (600, 100))], ids=["alone", "largest"])
    def test_blocks_of_streams_are_no_longer_than_a_row(self, runs, lengths):
        """A power of two of pages may be more than a row of the batch has, which a copy would begin before."""
        case = Case((lengths, (1,) * len(runs)), runs, page_size=128, dtype=jnp.int8, log_mass=True)
        problem = build(case, "stacked")
        want, got = reference.decode(problem), decode(problem, tpu.TpuConfig(rows=2048, buffers=4))
        np.testing.assert_allclose(got.out, want.out, atol=2e-2, rtol=2e-2)
        np.testing.assert_allclose(got.lse, want.lse, atol=2e-2, rtol=2e-2)

    @pytest.mark.slow
    def test_a_block_that_begins_in_its_neighbour_leaves_its_scores(self):
        """The last head's block of four pages begins a page early, so that it ends with the row."""
        case = Case(((300, 100, 300),), (3, 1, 3), page_size=128, dtype=jnp.int8, with_logits=True)
        problem = build(case, "stacked")
        want, got = reference.decode(problem), decode(problem, dataclasses.replace(SMALL, rows=512))
        np.testing.assert_allclose(got.logits, want.logits, atol=8e-2, rtol=2e-2)

    def test_heads_that_hold_nothing(self):
        got = decode(build(Case(((0, 0), (0, 0)), RAGGED), "stacked"))
        assert not np.asarray(got.out).any() and (np.asarray(got.lse) == np.float32(NEG)).all()


@pytest.mark.parametrize(
    ("case", "config"),
    [
        # A ring that is smaller than the list, blocks that are not full, the first that a buffer holds among them.
        (Case(((300, 5), (0, 129)), (20, 9), log_mass=True), SMALL),
        # Two cores, of which one continues a head that the other began.
        (Case(((700, 5),), (44, 1), window=600), dataclasses.replace(SMALL, cores=2)),
        # Every stream and the scores on their way out, over both of their buffers and more.
        (
            Case(((700, 5),), (6, 1), page_size=128, dtype=jnp.int8, alibi=True, window=2000, with_logits=True),
            SMALL,
        ),
        (by_row(((300, 5), (1, 440)), ((20, 9), (1, 28)), log_mass=True), SMALL),
        # Two blocks an iteration: an odd number on each of two cores, and the scores on their way out.
        (Case(((600, 5),), (38, 1), dtype=jnp.bfloat16), dataclasses.replace(TWO, cores=2)),
        (
            Case(((900, 5),), (8, 1), page_size=128, dtype=jnp.int8, alibi=True, window=2000, with_logits=True),
            TWO,
        ),
    ],
    ids=["ring", "cores", "streams", "runs by row", "two together", "two together, streams"],
)
def test_no_copy_races_with_what_is_read(case, config):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    problem = build(case, "stacked")
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=config.cores or 1)
    got = decode(problem, config, interpret)
    want = reference.decode(dataclasses.replace(problem, q=problem.q.astype(jnp.float32)))
    np.testing.assert_allclose(np.asarray(got.out, np.float32), want.out, atol=2e-2, rtol=2e-2)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("case", "layout", "sentence"),
    [
        (Case(((5, 9),), (1, 1)), "columns", "not columns"),
        (Case(((5, 9),), (1, 1), head_dim=80), "stacked", "Rows of 80 lanes"),
        (Case(((5, 9),), (1, 1), dtype=jnp.float16), "stacked", "not float16"),
        (Case(((5, 9),), (1, 1), page_size=24), "stacked", "Pages of 24"),
        (Case(((5, 9),), (1, 1), page_size=32, dtype=jnp.int8), "stacked", "pages of 128 slots, not 32"),
        (Case(((5, 9),), (1, 1), with_logits=True), "stacked", "pages of 128 slots, not 16"),
        (Case(((5, 9),), (1, 1), dtype=jnp.float8_e4m3fn, page_size=128), "stacked", "store int8"),
    ],
)
def test_what_does_not_fit_is_refused(case, layout, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        tpu.decode(build(case, layout), config=SMALL)


def test_more_than_the_chip_holds_is_refused():
    def shapes(batch, run):
        return (
            jax.ShapeDtypeStruct((batch, 8, 8, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, 8 * run, 2, 128, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, 8), jnp.int32),
        )

    def step(run):
        def call(q, kv, length):
            problem = tpu.Problem(q, tpu.Stacked(kv, 128), length, (run,) * 8, 1.0)
            return tpu.decode(problem, config=SMALL)

        return call

    with pytest.raises(NotImplementedError, match="scalar memory holds 921600"):
        jax.eval_shape(step(6000), *shapes(1, 6000))
    with pytest.raises(NotImplementedError, match="vector memory holds"):
        jax.eval_shape(step(1), *shapes(2048, 1))


def test_blocks_shrink_to_the_longest_head_and_queries_are_cut_into_strips():
    def fit(group, pages, dtype=jnp.bfloat16, **options):
        q, kv = np.zeros((1, 1, group, 128), dtype), np.zeros((1, pages, 2, 16, 128), dtype)
        problem = tpu.Problem(q, tpu.Stacked(kv, 128), np.zeros((1, 1), np.int32), (pages,), 1.0, **options)
        return tpu.fit(tpu.TpuConfig(rows=1024, buffers=8), problem)

    assert fit(8, 1000) == (64, 8, 1)
    assert fit(8, 20) == (32, 16, 1)
    assert fit(8, 1) == (8, 32, 1)
    assert fit(8, 1000, jnp.float32) == (32, 16, 1)
    assert fit(64, 1000) == (32, 16, 2)
    assert fit(64, 1000, jnp.float32) == (32, 16, 8)
    assert fit(71, 1000) == (32, 16, 4)
    assert fit(64, 1000, with_logits=True) == (8, 32, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "cores"), [(64, 1), (40, 1), (71, 2)])
def test_more_queries_than_a_turn_takes(dtype, group, cores):
    case = Case(((70, 300, 0), (5, 513, 1)), (10, 40, 1), group=group, dtype=dtype, page_size=128, log_mass=True)
    for more in ({}, {"window": 200}, {"alibi": True, "window": 1500}):
        problem = build(dataclasses.replace(case, **more), "stacked")
        wide = dataclasses.replace(problem, q=problem.q.astype(jnp.float32))
        want, got = reference.decode(wide), decode(problem, dataclasses.replace(SMALL, cores=cores))
        tolerance = TestTpu.tolerance[jnp.dtype(dtype).name]
        np.testing.assert_allclose(np.asarray(got.out, np.float32), want.out, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(got.lse, want.lse, atol=tolerance, rtol=tolerance)


def test_float32_is_as_exact_as_float32():
    """Against float64; the three bfloat16 parts of a number hold as much as it does."""
    problem = build(Case(((130,),), (9,), poison=False), "stacked")
    k, v = (np.asarray(problem.pages.kv[0, :, half], np.float64).reshape(-1, 128)[:130] for half in range(2))
    score = np.asarray(problem.q[0, 0], np.float64) @ k.T * problem.scale
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    want = weight @ v / weight.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(decode(problem).out[0, 0], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "cpu"])
def test_default_blocks_fit_the_vector_memory_of_every_chip(kind):
    for head_dim, dtype in ((64, jnp.bfloat16), (128, jnp.bfloat16), (256, jnp.float32), (128, jnp.int8)):
        config = tpu.TpuConfig.default(kind, 128, head_dim, dtype)
        lanes = 128 if head_dim == 64 else 2 * head_dim
        assert config.rows * config.buffers * lanes * jnp.dtype(dtype).itemsize <= 24 * 2**20


def test_a_config_that_cannot_be_is_refused():
    for wrong in ({"rows": 500}, {"buffers": 6}, {"buffers": 2}, {"together": 3}, {"buffers": 4, "together": 2}):
        with pytest.raises(ValueError, match="powers of two"):
            tpu.TpuConfig(**wrong)


@pytest.mark.parametrize("x64", [False, True])
def test_lowers_for_tpu(x64):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    for case, layout in (
        (Case(((300, 5),), (20, 1), dtype=jnp.bfloat16, log_mass=True, soft_cap=30.0), "stacked"),
        (Case(((300, 5),), (3, 1), dtype=jnp.int8, page_size=128, alibi=True, window=9, with_logits=True), "stacked"),
        (Case(((300, 5),), (20, 1), dtype=jnp.bfloat16, head_dim=64, window=100), "lanes"),
        (Case(((300, 5),), (20, 1), head_dim=256), "stacked"),
        (by_row(((300, 5),), ((20, 1),), dtype=jnp.bfloat16, window=100), "stacked"),
        (Case(((300, 5),), (3, 1), group=64, dtype=jnp.bfloat16, page_size=128, alibi=True, window=9), "stacked"),
    ):
        problem = build(case, layout)
        # Leaves, since an exported function's arguments must be types that JAX can write down.
        leaves, tree = jax.tree.flatten({name: getattr(problem, name) for name in ARRAYS})

        def step(leaves, problem=problem, tree=tree):
            return tuple(tpu.decode(dataclasses.replace(problem, **jax.tree.unflatten(tree, leaves))))

        with jax.enable_x64(x64):
            exported = jax.export.export(jax.jit(step), platforms=["tpu"])(leaves)
        assert "tpu_custom_call" in exported.mlir_module() and exported.serialize()


def test_blocks_of_streams_stay_in_their_row():
    items = work_list(
        jnp.asarray([0, 2, 5, 7], jnp.int32),
        jnp.asarray([8, 9, 0, 12], jnp.int32),
        page_size=4,
        pages_per_item=4,
        max_items=8,
        total_pages=10,
        row_pages=5,
    )
    count = int(items.count[0])
    assert items.page[:count].tolist() == [0, 1, 6]
    assert items.low[:count].tolist() == [0, 4, 4] and items.high[:count].tolist() == [8, 13, 16]


def test_a_single_query_is_compiled_as_two():
    """Mosaic of JAX 0.12 spreads no single row over sublanes; interpret mode, and older compilers, would not tell."""
    case = cases_decode.case(
        "one", cases_decode.Shape(group=1, alibi=True), "tpu", ("tpu",), options={"interpret": True}
    )
    text = str(jax.make_jaxpr(case.function)(*case.arguments))
    assert "bf16[64,2,128]" in text and "bf16[64,1,128]" not in text
