"""What operations are given: what is wrong is one sentence that names it, before anything is computed."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import decode_base, prefill_base

from pallas_kernels.attention_mass import Masses, attention_mass, log_sum_exp
from pallas_kernels.attention_mass import triton as mass_triton
from pallas_kernels.prefill import prefill
from pallas_kernels.prefill import triton as prefill_triton
from pallas_kernels.ragged_decode import ragged_decode
from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig
from pallas_kernels.tpu import tiles


def decode(**changes):
    case = decode_base.Case(((5, 9),), (1, 2), page_size=64, dtype=jnp.bfloat16, alibi=True)
    p = decode_base.build(case, "stacked")
    given = {"q": p.q, "pages": p.pages, "length": p.length, "runs": p.runs, "scale": p.scale, **changes}
    return ragged_decode(given.pop("q"), given.pop("pages"), given.pop("length"), **given)


Q = jnp.zeros((1, 2, 4, 128))
STARTS = jnp.array([[0, 1]], jnp.int32)
POSITION, QUERY, SLOPES = jnp.zeros((1, 3, 64), jnp.int32), jnp.zeros((1,), jnp.int32), jnp.ones((2, 4))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": Q[0]}, "q is float32[2, 4, 128]; give a float array of shape [1, any, any, 128]."),
        ({"q": Q[..., :64]}, "q is float32[1, 2, 4, 64]"),
        ({"q": jnp.zeros((2, 2, 4, 128))}, "q is float32[2, 2, 4, 128]"),
        ({"q": Q.astype(jnp.int32)}, "q is int32[1, 2, 4, 128]"),
        ({"q": Q[:, :, :0]}, "q (1, 2, 0, 128), 3 pages; they must agree."),
        ({"q": Q[:, :1]}, "2 runs of 3 pages, q (1, 1, 4, 128)"),
        ({"pages": Q}, "pages are of type ArrayImpl; give Columns, Stacked or Lanes"),
        ({"length": jnp.ones((1, 2))}, "length is float32[1, 2]; give an integer array of shape [1, 2]."),
        ({"length": jnp.ones((2,), jnp.int32)}, "length is int32[2]"),
        ({"length": [[5, 9]]}, "length is a list; give an integer array of shape [1, 2]."),
        ({"runs": (1, 1)}, "2 runs of 2 pages"),
        ({"runs": (0, 3)}, "a head's run is 0; give an integer of at least 1."),
        ({"runs": (1.0, 2.0)}, "a head's run is 1.0"),
        ({"starts": jnp.zeros((1, 2))}, "starts is float32[1, 2]; give an integer array of shape [1, 2]."),
        ({"starts": jnp.zeros((2,), jnp.int32)}, "starts is int32[2]"),
        ({"starts": [0, 1]}, "starts is a list"),
        ({"starts": STARTS, "runs": (1, 4)}, "2 runs of 5 pages, q (1, 2, 4, 128), 3 pages; they must agree."),
        ({"starts": STARTS, "runs": (1, 1)}, "2 runs of 2 pages"),
        ({"starts": STARTS, "runs": (2,)}, "1 runs of 2 pages"),
        ({"starts": STARTS, "runs": (0, 3)}, "a head's run is 0; give an integer of at least 1."),
        ({"log_mass": jnp.zeros((1, 3))}, "log_mass is float32[1, 3]; give a float array of shape [1, 2]."),
        ({"k_scale": jnp.ones((1, 2))}, "k_scale is float32[1, 2]; give a float array of shape [1, 2, 128]."),
        ({"v_scale": jnp.ones((1, 3))}, "v_scale is float32[1, 3]; give a float array of shape [1, 3, 64]."),
        ({"slopes": SLOPES[:, 0], "position": POSITION, "query_position": QUERY}, "slopes is float32[2]"),
        ({"slopes": SLOPES}, "slopes, and a window by position, need the position of every slot"),
        ({"position": POSITION, "window": 3}, "slopes, and a window by position, need"),
        ({"position": POSITION[:, :1], "query_position": QUERY}, "position is int32[1, 1, 64]"),
        ({"position": POSITION, "query_position": QUERY[0]}, "query_position is int32[]"),
        ({"window": 0}, "window is 0; give an integer of at least 1."),
        ({"window": 2**31}, "positions are int32, so give at most 2147483647."),
        ({"window": 2.5}, "window is 2.5"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; give one finite number above 0."),
        ({"scale": 0.0}, "scale is 0.0; give one finite number other than 0."),
        ({"scale": jnp.ones((2,))}, "scale is float32[2]"),
        ({"logits_scale": float("nan")}, "logits_scale is nan"),
        ({"implementation": "cudnn"}, "no implementation 'cudnn'; there are native, tpu, mosaic_gpu, triton"),
        ({"config": MosaicGpuConfig(2)}, "ragged_decode was given config for no implementation; name the one"),
    ],
)
def test_of_a_decode_step(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        jax.eval_shape(lambda: decode(**changes))
    assert "\n" not in str(error.value)


def test_the_most_pages_of_heads_need_not_sum_to_a_row():
    whole, given = decode(), decode(starts=STARTS, runs=(2, 2))
    np.testing.assert_allclose(np.asarray(given.out, np.float32), np.asarray(whole.out, np.float32), atol=2e-2)
    np.testing.assert_allclose(given.lse, whole.lse, atol=1e-5)


def test_pages_of_other_numbers():
    p = decode_base.build(decode_base.Case(((5, 9),), (1, 2)), "stacked")
    with pytest.raises(ValueError, match="pages are int32; give floats or int8"):
        decode(pages=dataclasses.replace(p.pages, kv=p.pages.kv.astype(jnp.int32)))


@pytest.mark.parametrize("implementation", ["tpu", "mosaic_gpu", "triton"])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_an_implementation_that_is_named_does_not_give_way(implementation):
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        decode(implementation=implementation)


@pytest.fixture(scope="module")
def chunk():
    return prefill_base.build(prefill_base.Case((10, 20), kept=(1, 65)))


@pytest.fixture(params=["prefill", "log_sum_exp", "attention_mass"])
def call(request, chunk):
    def run(*, v=chunk.v, lse=None, **changes):
        given = {"q": chunk.q, "k": chunk.k, "offset": chunk.offset, "scale": chunk.scale, **changes}
        q, k = given.pop("q"), given.pop("k")
        if request.param == "prefill":
            return prefill(q, k, v, **given)
        if request.param == "log_sum_exp":
            return log_sum_exp(q, k, **given)
        return attention_mass(q, k, jnp.zeros(chunk.q.shape[:4]) if lse is None else lse, **given)

    run.of = request.param
    return run


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: {"q": p.q[0]}, "q is float32[2, 2, 64, 64]"),
        (lambda p: {"q": p.q[:, :1]}, "k is float32[2, 2, 320, 64]; give a float array of shape [2, 1, any, 64]."),
        (lambda p: {"k": p.k.astype(jnp.int32)}, "k is int32[2, 2, 320, 64]"),
        (lambda p: {"q": p.q[:, :, :, :0]}, "queries are float32[2, 2, 2, 0, 64] with 320 keys"),
        (lambda p: {"offset": 2.5}, "offset is 2.5; give an integer, or one for each of 2 rows."),
        (lambda p: {"offset": jnp.zeros((3,), jnp.int32)}, "offset is int32[3]"),
        (lambda p: {"scale": jnp.ones((3,))}, "scale is float32[3]; give"),
        (lambda p: {"block": 7}, "block 7 does not divide 320 keys."),
        (lambda p: {"block": 0}, "block is 0; give an integer of at least 1."),
        (lambda p: {"kept": dataclasses.replace(p.kept, k=p.kept.k[:, :1])}, "kept.k is float32[2, 1, 128, 64]"),
        (lambda p: {"kept": dataclasses.replace(p.kept, block=7)}, "kept.block is 7; give a divisor of its 128 slots."),
        (lambda p: {"kept": dataclasses.replace(p.kept, length=p.kept.length[:1])}, "kept.length is int32[1, 2]"),
        (lambda p: {"kept": dataclasses.replace(p.kept, log_mass=p.scale)}, "kept.log_mass is a float"),
        (lambda p: {"interpret": True}, "was given interpret for no implementation"),
        (lambda p: {"implementation": "cudnn"}, "has no implementation 'cudnn'; there are "),
    ],
)
def test_of_a_chunk(call, chunk, change, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        jax.eval_shape(lambda: call(**change(chunk)))
    assert "\n" not in str(error.value)


def test_of_prefill_alone(chunk):
    def run(v=chunk.v, offset=0, **given):
        return jax.eval_shape(lambda: prefill(chunk.q, chunk.k, v, offset=offset, scale=chunk.scale, **given))

    with pytest.raises(ValueError, match=re.escape("v is float32[2, 2, 319, 64]; give")):
        run(v=chunk.v[:, :, 1:])
    with pytest.raises(ValueError, match=re.escape("length is int32[3]; give an integer array of shape [2].")):
        run(length=jnp.zeros((3,), jnp.int32))


def test_of_masses_alone(chunk):
    zeros = jnp.zeros((*chunk.q.shape[:3], chunk.k.shape[2]))
    lse = jnp.zeros(chunk.q.shape[:4])

    def run(lse=lse, **given):
        where = {"offset": chunk.offset, "scale": chunk.scale}
        return jax.eval_shape(lambda: attention_mass(chunk.q, chunk.k, lse, **where, **given))

    with pytest.raises(ValueError, match=re.escape("lse is float32[2, 2]; give a float array of shape [2, 2, 2, 64].")):
        run(lse[0, 0, :, :2])
    with pytest.raises(ValueError, match=re.escape("weight is float32[2, 3]; give")):
        run(weight=jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=re.escape("onto.new is float32[2, 2, 2, 3]; give")):
        run(onto=Masses(zeros[..., :3], None))
    with pytest.raises(ValueError, match="kept tokens and the masses they are added to"):
        run(onto=Masses(zeros, None), kept=chunk.kept)
    with pytest.raises(ValueError, match=re.escape("onto.kept is float32[2, 2, 2, 320]; give")):
        run(onto=Masses(zeros, zeros), kept=chunk.kept)
    assert run(onto=Masses(zeros.astype(jnp.bfloat16), None)).new.dtype == jnp.float32


@pytest.mark.parametrize(
    ("kind", "wrong", "sentence"),
    [
        (tiles.Config, {"queries": 64}, "queries is 64; give an integer of at least 128."),
        (tiles.Config, {"queries": 192}, "queries is 192; give a multiple of 128."),
        (tiles.Config, {"queries": 128.0}, "queries is 128.0; give an integer of at least 128."),
        (tiles.Config, {"keys": 64}, "keys is 64; give a power of two from 128 on."),
        (tiles.Config, {"keys": 384}, "keys is 384; give a power of two from 128 on."),
        (tiles.Config, {"part": 320}, "part is 320; give a power of two from 128 on."),
        *[
            (kind, wrong, sentence)
            for kind in (mass_triton.Config, prefill_triton.Config)
            for wrong, sentence in [
                ({"queries": 8}, "queries is 8; give a power of two from 16 on."),
                ({"keys": 96}, "keys is 96; give a power of two from 16 on."),
                ({"keys": "64"}, "keys is '64'; give a power of two from 16 on."),
                ({"warps": 3}, "warps is 3; give a power of two from 1 on."),
                ({"stages": 0}, "stages is 0; give an integer of at least 1."),
            ]
        ],
        (mass_triton.Config, {"split": 192}, "split is 192; give a multiple of keys, which is 128, or None."),
        (mass_triton.Config, {"split": 0}, "split is 0; give a multiple of keys"),
    ],
)
def test_of_block_sizes(kind, wrong, sentence):
    kind()
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        kind(**wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("number", [np.float64(0.1), np.array(0.1), jnp.bfloat16(0.1)], ids=repr)
def test_a_scale_may_be_any_kind_of_number(chunk, number, x64):
    """XLA's forms would compute in what a NumPy number is of."""
    with jax.enable_x64(x64):
        found = prefill(chunk.q, chunk.k, chunk.v, offset=3, scale=number, implementation="xla")
        assert found.out.dtype == found.lse.dtype == jnp.float32
        done = decode(scale=number, soft_cap=number, with_logits=True, logits_scale=number)
        assert done.logits is not None and done.lse.dtype == done.logits.dtype == jnp.float32
        weight = jnp.asarray(np.ones(chunk.q.shape[::3]))
        masses = attention_mass(chunk.q, chunk.k, found.lse, offset=3, scale=number, weight=weight)
        assert masses.new.dtype == jnp.float32


@pytest.mark.parametrize(
    ("run", "implementation"),
    [
        *(("prefill", x) for x in ("tpu", "triton", "xla")),
        *(("decode", x) for x in ("tpu", "triton", "mosaic_gpu", "xla")),
    ],
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_a_traced_scale_is_for_xla_alone(chunk, run, implementation):
    def of(scale):
        if run == "decode":
            return decode(scale=scale, implementation=implementation).out
        return prefill(chunk.q, chunk.k, chunk.v, offset=3, scale=scale, implementation=implementation).out

    if implementation == "xla":
        np.testing.assert_allclose(jax.jit(of)(0.1), of(0.1), atol=1e-6)
        return
    with pytest.raises(NotImplementedError, match="is traced"):
        jax.eval_shape(of, 0.1)
