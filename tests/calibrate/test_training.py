"""Scorers and gates that kvjax trains: the numbers they are made of, resumption, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from kvjax import waiting
from kvjax.calibrate import head_gates, kvzip_scorer, training
from kvjax.calibrate.head_gates import PassKeys, gates, rate_of
from kvjax.calibrate.kvzip_scorer import Standardised, scorer
from kvjax.calibrate.loss_curve import loss_curve
from kvjax.calibrate.training import train, training_folder
from kvjax.errors import KvjaxError, UsageError
from kvjax.model.alibi import slopes
from kvjax.policies import KVzip
from kvjax.policies.head_choice import gated_heads
from kvjax.prompts import as_told
from kvjax.runtime.gated_forward import hidden_states
from kvjax.runtime.kvzip_scores import scored_tokens
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from kvjax.runtime.programs import Programs

TEXT = " ".join(f"Item {i} weighs {7 * i % 31} grams and stands in row {i % 9}." for i in range(150))


class Interrupted(Exception):
    pass


# --- the loop --------------------------------------------------------------------------------------------------------


def quadratic(params, batch, fixed):
    return ((params["x"] - fixed * batch) ** 2).sum()


def run(folder=None, stop=None, steps=25):
    def batch(step):
        if step == stop:
            raise Interrupted
        return jnp.float32(1 + step % 3)

    start = {"x": np.zeros(2, np.float32)}
    return train(
        quadratic, start, jnp.float32(2), batch, optax.adam(0.1), steps, folder=folder, every=10,
        project=lambda params: jax.tree.map(lambda x: jnp.clip(x, 0, 1.5), params),
    )  # fmt: skip


def test_ctrl_c_while_a_step_is_computed_is_a_keyboard_interrupt():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled in the main thread, and this test runs in another")

    def slow(params):  # seconds
        return jax.lax.fori_loop(0, 150, lambda i, x: x @ x, params)

    def pressing(step):
        if step == 1:  # by then all is compiled
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return 0

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start = np.zeros((1000, 1000), np.float32)
            train(lambda x, b, f: x.sum(), start, None, pressing, optax.sgd(1.0), 3, project=slow)
    finally:
        signal.signal(signal.SIGINT, previous)
        waiting.wait_for_abandoned()


def test_an_interrupted_training_ends_with_the_numbers_of_one_that_was_not(tmp_path):
    folder = tmp_path / "run"
    training_folder(folder, {"kind": "toy", "steps": 25})
    with pytest.raises(Interrupted):
        run(folder, stop=17)
    training_folder(folder, {"kind": "toy", "steps": 25})
    found = run(folder)
    whole = run()
    np.testing.assert_array_equal(found.losses, whole.losses)
    np.testing.assert_array_equal(found.params["x"], whole.params["x"])
    assert (whole.params["x"] <= 1.5).all() and whole.losses[-1] < whole.losses[0]
    run(folder, stop=24)  # it ended: no step is done again


def test_a_folder_of_another_training_or_of_something_else_is_refused(tmp_path):
    training_folder(tmp_path / "run", {"kind": "toy", "steps": 25})
    with pytest.raises(UsageError, match="holds a training with steps '25', and this one has '26'"):
        training_folder(tmp_path / "run", {"kind": "toy", "steps": 26})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(UsageError, match="something else than a training"):
        training_folder(tmp_path / "mine", {})
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".settings.json-x1").write_text("{")
    training_folder(tmp_path / "killed", {"kind": "toy"})
    training.remove_training(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    training.remove_training(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_and_a_loss_that_is_not_finite_are_one_sentence(tmp_path):
    folder = tmp_path / "run"
    training_folder(folder, {})
    run(folder)
    with pytest.raises(KvjaxError, match="is damaged"):
        run(folder, steps=30)  # another number of losses
    with pytest.raises(KvjaxError, match="lower learning rate"):
        train(lambda x, b, f: jnp.nan * x.sum(), np.ones(1, np.float32), None, lambda step: 0, optax.sgd(1.0), 2)


# Orbax's threads go on for a moment after their loop was closed, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_full_is_one_sentence(tmp_path):
    """A limit on the size of files fails writes as a full disk does."""
    training_folder(tmp_path / "run", {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(KvjaxError, match=r"The training cannot be written to .*: the disk is full\.") as caught:
            training._save(tmp_path / "run", 1, {"x": noise})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)


def test_the_curve_is_a_picture():
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    assert loss_curve(np.geomspace(9, 0.1, 80), "toy", "loss", {"before": 2.0}).startswith(b"\x89PNG")


# --- scorers ---------------------------------------------------------------------------------------------------------


class Inputs(LayerObserver):
    def before_layer(self, layer, x, rope):
        return layer.input_norm(x)

    def finish(self, partial, before, k, kept):
        return before


jax.tree_util.register_static(Inputs)


@pytest.mark.slow
def test_tokens_are_scored_as_kvzip_marks_them_and_each_prompt_as_alone():
    import kvjax
    from kvjax.cache.pool import mark_by_head

    lm = toys.tiny_model()
    policy = as_told(lm, KVzip(budget=200, chunk=32))
    prompts = [[7 * i % 97 for i in range(90)], [5 * i % 89 for i in range(61)]]
    picked = [np.array([0, 3, 40, 60]), np.array([1, 2, 30, 60])]
    asked = policy.signals.repeat
    hidden, scores = scored_tokens(Programs(), lm.params, prompts, picked, asked)
    read = [np.asarray(found) for _, found in forward_layers(lm.params, prompts, Inputs())]
    for row, (ids, places) in enumerate(zip(prompts, picked, strict=True)):
        alone = scored_tokens(Programs(), lm.params, [ids], [places], asked)
        np.testing.assert_allclose(alone[0][0], hidden[row], atol=1e-5)
        np.testing.assert_allclose(alone[1][0], scores[row], atol=1e-5)
        cache = kvjax.generate(lm, ids, policy=policy, max_new_tokens=1).cache
        for layer in range(lm.config.num_layers):
            marks = np.asarray(mark_by_head(cache.layers[layer], "repeated"))[0][:, places]
            np.testing.assert_allclose(scores[row, layer], marks, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(hidden[row, layer], read[layer][row, places], atol=1e-5)


def test_what_is_packed_are_the_maps_of_inputs_as_they_were():
    rng = np.random.default_rng(0)
    hidden = (rng.standard_normal((4, 2, 30, 5)) * [1, 40, 0.02, 3, 1] + [0, 90, 0, -7, 1]).astype(np.float16)
    weights = rng.standard_normal((2, 3, 5)) / [1, 40, 0.02, 3, 1]
    scores = np.einsum("plsm,lhm->plhs", hidden.astype(np.float64), weights) - 4
    data = Standardised.of(hidden, scores)
    flat = data.inputs.astype(np.float32)
    assert np.abs(flat.mean(axis=1)).max() < 1e-2 and np.abs(data.targets.mean(axis=-1)).max() < 1e-3
    best = [np.linalg.lstsq(x, y.T, rcond=None)[0].T for x, y in zip(flat, data.targets, strict=True)]
    packed = data.packed({"weight": np.stack(best), "bias": np.zeros((2, 3), np.float32)})
    correlation, before, after = kvzip_scorer._judged(packed, hidden, scores, data.mean_target)
    assert correlation > 0.999 and after < 1e-3 * before


def test_a_scorer_learns_and_goes_on_where_it_was(tmp_path, monkeypatch):
    lm, folder = toys.tiny_model(), tmp_path / "run"
    options = dict(tokens=100, most=8, sampled=40, steps=120)
    whole = scorer(lm, [TEXT], **options)
    assert whole.after < 0.9 * whole.before and whole.profile.correlation > 0.3
    assert (whole.profile.texts, whole.profile.tokens, whole.profile.steps) == (7, 280, 120)
    read = kvzip_scorer.scored_tokens
    calls = itertools.count()

    def interrupted(*given):
        if next(calls) == 3:
            raise Interrupted
        return read(*given)

    monkeypatch.setattr(kvzip_scorer, "scored_tokens", interrupted)
    with pytest.raises(Interrupted):
        scorer(lm, [TEXT], folder=folder, **options)
    assert scorer(lm, [TEXT], folder=folder, **options).profile == whole.profile
    assert next(calls) == 3 + 1 + 5, "what was read is not read again"
    with pytest.raises(UsageError, match="holds a training with seed"):
        scorer(lm, [TEXT], folder=folder, seed=1, **options)


def test_pieces_that_an_interrupted_run_left_damaged_are_one_sentence(tmp_path):
    lm, sampled = toys.tiny_model(), 20
    shapes = {"inputs": (1, 2, sampled, lm.config.hidden_size), "logs": (1, 2, 2, sampled)}
    good = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    file = tmp_path / "pieces-0-1.npz"
    np.savez(file, **good)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(KvjaxError, match=r"pieces-0-1.npz is damaged; remove it"):
            kvzip_scorer._saved(file, lm.config, 1, sampled)
    for other in ({"inputs": good["inputs"]}, good | {"logs": good["logs"][..., 1:]}, good | {"logs": np.array([{}])}):
        np.savez(file, **other)
        with pytest.raises(KvjaxError, match=r"pieces-0-1.npz is damaged; remove it"):
            kvzip_scorer._saved(file, lm.config, 1, sampled)
    np.savez(file, **good)
    assert kvzip_scorer._saved(file, lm.config, 1, sampled)[0].shape == shapes["inputs"]


def test_maps_that_float16_does_not_hold_are_one_sentence():
    data = Standardised.of(np.ones((1, 2, 4, 3), np.float16), np.zeros((1, 2, 1, 4), np.float32))
    for weight, bias in ((1e9, 0.0), (0.0, 1e6), (np.nan, 0.0)):
        params = {"weight": np.full((2, 1, 3), weight, np.float32), "bias": np.full((2, 1), bias, np.float32)}
        with pytest.raises(KvjaxError, match="give a lower learning rate"):
            data.packed(params)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 100, "most": 1}, "most"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"tokens": 10}, "holds"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_requests_of_a_scorer_are_one_sentence(given, said):
    with pytest.raises(UsageError, match=said):
        scorer(toys.tiny_model(), [TEXT], **given)
    with pytest.raises(UsageError, match="fewer than 2 pieces"):
        scorer(toys.tiny_model(), ["short"])


# --- gates -----------------------------------------------------------------------------------------------------------


def attended(q, k, v, seen, scale, bias):
    """One query head's attention in float64: [T, D]."""
    logits = np.where(seen, q @ k.T * scale + bias, -np.inf)
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize(
    "changes", [{}, {"positional": "alibi", "norm": "layer", "mlp": "gelu"}, {"windows": (8, None)}]
)
def test_a_gate_of_one_is_the_model_and_one_of_zero_sees_sinks_and_recent_tokens(changes):
    lm = toys.tiny_model(**changes)
    ids = jnp.asarray([[7 * i % 97 for i in range(64)]])
    layers = [i for i in range(lm.config.num_layers) if lm.config.window_of(i) is None]
    *_, (last, _) = forward_layers(lm.params, ids.tolist(), Inputs())
    plain = lm.params.norm(last)
    np.testing.assert_allclose(hidden_states(lm.params, ids), plain, atol=2e-5)
    ones = jnp.ones((len(layers), 2))
    np.testing.assert_allclose(hidden_states(lm.params, ids, ones, sink=2, recent=5), plain, atol=2e-5)
    everything = hidden_states(lm.params, ids, jnp.zeros_like(ones), sink=0, recent=64)
    np.testing.assert_allclose(everything, plain, atol=2e-5)
    # The last layer's attention by hand, where it reads what the model itself gives it.
    if changes.get("windows"):
        return
    gates_of = jnp.asarray([[1.0, 1.0], [0.25, 0.0]])
    found = hidden_states(lm.params, ids, gates_of, sink=2, recent=5)
    layer, before = lm.params.layers[1], None
    for before, _ in itertools.islice(forward_layers(lm.params, ids.tolist(), Inputs()), 1):
        before = jnp.array(before)
    from kvjax.model.rope import angles_of_layers, apply_rope

    place = np.arange(64)
    rope = angles_of_layers([layer.config], jnp.asarray(place[None]), jnp.asarray([64]))[0]
    q, k, v = layer.project(before)
    q, k, v = (np.asarray(x, np.float64) for x in (apply_rope(q, rope), apply_rope(k, rope), v))
    back = place[:, None] - place
    stream = (back >= 0) & ((place < 2) | (back < 5))
    out = np.zeros(q.shape)
    for head in range(2):
        for group in range(2):
            bias = -slopes(lm.config)[head, group] * back if lm.config.positional == "alibi" else 0.0
            given = q[0, :, head, group], k[0, :, head], v[0, :, head]
            full, some = (attended(*given, seen, lm.config.attention_scale, bias) for seen in (back >= 0, stream))
            share = float(gates_of[1, head])
            out[0, :, head, group] = share * full + (1 - share) * some
    wanted = lm.params.norm(layer.finish(before, jnp.asarray(out, jnp.float32)))
    np.testing.assert_allclose(found, wanted, atol=5e-5)


def test_pass_keys_stand_in_the_text_and_are_asked_for_behind_it():
    lm = toys.tiny_model()
    task = PassKeys.of(lm, [TEXT], 500, 1, 2, 3)
    for index in range(5):
        ids, where = task.sample(index)
        assert len(ids) == 500 and (np.diff(where) == 1).all()
        answer = lm.tokenizer.decode(ids[where + 1].tolist())
        text = lm.tokenizer.decode(ids.tolist())
        assert len(answer.split()) == 2 and set(answer.split()) <= set(head_gates.WORDS)
        assert text.count(f"the first pass key of the vault is{answer}.") == 1, "hidden"
        assert text.endswith(f"The first pass key of the vault is{answer}"), "asked for"
    assert (task.sample(0)[0] == task.sample(0)[0]).all() and (task.sample(0)[0] != task.sample(1)[0]).any()


def test_the_rate_rises_and_falls_as_the_official_one():
    rate = rate_of(0.02, 100)
    found = [float(rate(step)) for step in (0, 1, 9, 19, 50, 80, 90, 99)]
    np.testing.assert_allclose(found, 0.02 * np.array([0.1, 0.1, 0.5, 1, 1, 1, 0.5, 0.1]), rtol=1e-5)


@pytest.mark.slow
def test_gates_that_nothing_needs_close_and_the_run_goes_on_where_it_was(tmp_path):
    lm, folder = toys.tiny_model(), tmp_path / "run"
    options = dict(tokens=500, keys=1, words=2, steps=12, sink=1, recent=8, penalty=3.0, learning_rate=0.2)
    whole = gates(lm, [TEXT], **options)
    # A random model's hidden states hardly depend on distant tokens, so the penalty wins.
    assert np.mean(whole.profile.gates) < 0.5 and whole.losses[-1] < whole.losses[0]
    assert gates(lm, [TEXT], folder=folder, **options).profile == whole.profile
    shutil.rmtree(folder / "steps" / "12")
    assert gates(lm, [TEXT], folder=folder, **options).profile == whole.profile
    free = gates(lm, [TEXT], **(options | {"penalty": 0.0, "steps": 3}))
    assert np.min(free.profile.gates) == 1.0, "with no penalty the model itself is best"
    held = json.loads((folder / "settings.json").read_text())
    assert (held["kind"], held["rows"]) == ("gates", "1"), "on a mesh with more rows a step has other texts"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_gates_of_a_quantised_model_are_trained_as_those_of_floats(weights):
    changes = dict(hidden_size=64, intermediate_size=64, max_position=1024)
    options = dict(tokens=300, keys=1, words=2, steps=3, sink=1, recent=8, learning_rate=0.05)
    floats = gates(toys.tiny_model(**changes), [TEXT], **options)
    found = gates(toys.tiny_model(weights=weights, **changes), [TEXT], **options)
    assert found.losses[-1] < found.losses[0]
    np.testing.assert_allclose(found.losses, floats.losses, rtol=0.02)


def test_the_highest_gates_are_chosen_earlier_heads_first():
    from support.scorers import random_gates

    profile = random_gates(toys.tiny_config(num_layers=3), seed=1)
    for count in range(7):
        chosen = [(layer, head) for layer, heads in enumerate(gated_heads(profile, count)) for head in heads]
        values = sorted((-profile.gates[layer][head], layer, head) for layer in range(3) for head in range(2))
        assert sorted(chosen) == sorted((layer, head) for _, layer, head in values[:count])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keys": 11}, "keys"),
        ({"tokens": 120}, "give more tokens"),
        ({"penalty": -1}, "penalty"),
        ({"recent": 0}, "rec"),
    ],
)
def test_bad_requests_of_gates_are_one_sentence(given, said):
    with pytest.raises(UsageError, match=said):
        gates(toys.tiny_model(), [TEXT], **given)
