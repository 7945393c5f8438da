"""The watershed layer: shares against a dense forward, the curve against the definition, profiles and dialogues."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import toys
from support.rounds_oracle import dense_layers, q_att

import kvjax
from kvjax.calibrate import WatershedProfile, load_profile, save_profile, watershed
from kvjax.calibrate.divergence import divergence_to_later, first_minimum
from kvjax.calibrate.round_attention_mass import question_and_answer_mass, question_mass
from kvjax.eval.dialogues import read_dialogues
from kvjax.history import history_ids
from kvjax.policies.profile import ModelShape, model_name
from kvjax.policies.profile_files import folder

MESSAGES = [
    {"role": "system", "content": "S."},
    *(
        {"role": role, "content": text}
        for pair in (("One?", "Yes, one."), ("And two?", "Two"), ("?", "Three it is."))
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ),
]


@pytest.fixture(scope="module")
def lm():
    return toys.tiny_model(num_layers=4)


def test_shares_are_the_last_question_tokens_attention_over_rounds(lm):
    ids, starts = history_ids(lm, MESSAGES)
    asked = lm.tokenizer.encode("<|end|>\n<|start|>user\nWhich?<|end|>\n<|start|>assistant\n")
    prefix = len(lm.tokenizer.encode("<|start|>system\nS.<|end|>\n<|start|>user\n"))
    edges = [prefix, *starts[1:], len(ids)]
    whole = [*ids, *asked]
    found = question_mass(lm, MESSAGES, "Which?")
    assert found.shape == (4, 3)
    for layer, dense in enumerate(dense_layers(lm, whole, 4)):
        rounds = list(itertools.pairwise(edges))
        np.testing.assert_allclose(found[layer], q_att(dense, rounds, (len(whole) - 1, len(whole))), atol=1e-5)


def test_shares_of_a_question_and_of_its_answer(lm):
    ids, starts = history_ids(lm, MESSAGES)
    asked = lm.tokenizer.encode("<|end|>\n<|start|>user\nWhich?<|end|>\n<|start|>assistant\n")
    said = lm.tokenizer.encode("The second of them, I should think, " * 2)  # longer than the question
    edges = [len(lm.tokenizer.encode("<|start|>system\nS.<|end|>\n<|start|>user\n")), *starts[1:], len(ids)]
    rounds, answer = list(itertools.pairwise(edges)), len(ids) + len(asked)
    of_question, of_answer, lengths = question_and_answer_mass(lm, MESSAGES, "Which?", lm.tokenizer.decode(said))
    whole = [*ids, *asked, *said]
    for layer, dense in enumerate(dense_layers(lm, whole, 4)):
        np.testing.assert_allclose(of_question[layer], q_att(dense, rounds, (len(ids), answer)), atol=1e-5)
        np.testing.assert_allclose(of_answer[layer], q_att(dense, rounds, (answer, len(whole))), atol=1e-5)
    assert lengths == pytest.approx(np.diff(edges) / (len(ids) - edges[0]))
    with pytest.raises(kvjax.UsageError, match="no tokens"):
        question_and_answer_mass(lm, MESSAGES, "Which?", "")


def test_the_curve_is_the_mean_divergence_to_all_later_layers():
    shares = np.random.default_rng(0).dirichlet(np.ones(5), size=6)
    for i, found in enumerate(divergence_to_later(shares)):
        each = [sum(p * np.log(p / q) for p, q in zip(shares[i], later, strict=True)) for later in shares[i + 1 :]]
        assert found == pytest.approx(np.mean(each), rel=1e-4)
    assert (divergence_to_later(np.eye(4)) < 30).all()  # rounds without any attention are finite


@pytest.mark.parametrize(
    "curve, wanted",
    [
        ([9, 5, 1, 3, 0.5, 2], 2),  # the first, though a later one is lower
        ([9, 5, 4.9, 5.2, 1, 4], 4),  # a dent of 6 % is none
        ([4, 3, 10, 8, 12, 1.5, 1, 2.5, 1.2], 6),  # nor is a valley between peaks of a quarter of its height
        ([400, 1, 2, 0.5, 0.6], 1),  # low beside the highest, a minimum that doubles is one
        ([0.3, 0.2, 0.22, 0.1, 0.16, 0.05], 3),  # nor does it have to be low beside what comes later
        ([9, 6, 3, 1, 0.5, 0.1], 4),  # only falling: where a tenth of the range is left
        ([1, 1, 1], 0),
    ],
)
def test_the_first_significant_minimum(curve, wanted):
    assert first_minimum(np.array(curve, float), 0.5) == wanted
    assert first_minimum(np.array(curve, float) * 1e-3, 0.5) == wanted, "whatever the unit"


@pytest.mark.parametrize("path", sorted(folder().glob("*watershed.yaml")), ids=lambda path: path.stem)
def test_a_profile_that_comes_with_kvjax_follows_from_its_curve(path):
    made = load_profile(path)
    assert isinstance(made, WatershedProfile) and made.dialogues >= 20 and "/" not in made.model
    assert made.watershed == first_minimum(np.array(made.divergence[:-1]), made.prominence) + 1
    # No other profile is found in its place by models of its shape.
    assert [load_profile(other).shape for other in path.parent.glob("*watershed.yaml")].count(made.shape) == 1


def profile(config, **changes) -> WatershedProfile:
    values = dict(watershed=2, dialogues=3, rounds=20, prominence=0.1, divergence=(3.0, 1.0, 2.0, 0.0))
    return WatershedProfile("toy", ModelShape.of(config), **(values | changes))


def test_a_profile_is_a_small_file_and_a_policy_finds_its_layer_there(lm, tmp_path):
    path, made = tmp_path / "toy.yaml", profile(lm.config)
    save_profile(made, path)
    assert load_profile(path) == made and hash(load_profile(path)) == hash(made)
    policy = kvjax.RoundAttention(profile=str(path))
    assert policy.layers_below(lm.config) == 2
    policy.check(lm.config)
    with pytest.raises(kvjax.UsageError, match="another model"):
        policy.check(toys.tiny_config(num_layers=5))
    with pytest.raises(kvjax.UsageError, match="is one of retrieval-heads; RoundAttention takes those of"):
        kvjax.RoundAttention(profile=kvjax.calibrate.retrieval_heads(lm, tokens=4))
    for changes, says in (({"watershed": 4}, "1 to 3"), ({"divergence": (1.0,)}, "4 finite")):
        with pytest.raises(kvjax.UsageError, match=says):
            profile(lm.config, **changes)
    path.write_text(path.read_text().replace("watershed: 2", "watershed: two"))
    with pytest.raises(kvjax.UsageError, match="as watershed"):
        load_profile(path)


def test_a_profile_names_a_file_without_its_folders(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert model_name(str(tmp_path / "model.gguf")) == "model.gguf"
    assert model_name("owner/model") == "owner/model", "a hub id"


def test_what_cannot_be_calibrated_on_is_one_sentence(lm):
    for dialogues, says in (
        ([], "no dialogue"),
        ([(MESSAGES[1:3], "x")], "fewer than two rounds"),
        ([(MESSAGES, "x" * 600)], "context is 512"),
        ([(MESSAGES[:-1], "x")], "in turns"),
    ):
        with pytest.raises(kvjax.UsageError, match=says):
            watershed(lm, dialogues)


def test_dialogues_come_in_the_forms_of_the_data_sets(tmp_path):
    def read(content: str, tokens: int = 10_000):
        path = tmp_path / "file.json"
        path.write_text(content)
        return read_dialogues(path, len, tokens)

    (one,) = read(json.dumps([*MESSAGES, {"role": "user", "content": "Well?"}]))
    assert one.system == "S." and len(one.rounds) == 3 and one.questions[0].text == "Well?"
    assert one.messages() == MESSAGES
    # A call of a tool has no text; parts of a message are none that is known.
    called = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "user", "content": "Well?"}]
    assert read(json.dumps(called))[0].rounds == one.rounds
    with pytest.raises(kvjax.UsageError, match="no list of"):
        read(json.dumps([*MESSAGES, {"role": "user", "content": [{"type": "text", "text": "Well?"}]}]))
    # Longer than allowed: the last rounds stay, since the question follows them.
    (short,) = read(json.dumps([*MESSAGES, {"role": "user", "content": "Well?"}]), 50)
    assert short.rounds == one.rounds[1:]
    topic = "USER: I would like to discuss the topic of {0}. \n ASSISTANT: Sure. \n USER: More? \n ASSISTANT: {0}!\n "
    record = f"Memorize. Now the record start. {topic.format('Bees')}{topic.format('Tea')}Now the record ends. First?"
    (chat,) = read(json.dumps({"prompt": record, "topics": ["Bees", "Tea"]}))
    assert [question.gold for question in chat.questions] == [(0,), (0, 1), (2, 3)]
    assert chat.rounds[2] == ("I would like to discuss the topic of Tea.", "Sure.")
    assert chat.questions[0].text == "First?" and "bees" in chat.questions[1].text
    (cut,) = read(json.dumps({"prompt": record, "topics": ["Bees", "Tea"]}), 110)
    assert len(cut.rounds) == 2 and [question.gold for question in cut.questions] == [(0,), (0, 1)]
    turns = [[{"role": "user", "content": f"u{i}"}, {"role": "assistant", "content": f"a{i}"}] * 2 for i in range(3)]
    turns[1][3] = {"role": "assistant", "content": "the answer", "has_answer": True}
    item = {"haystack_sessions": turns, "haystack_session_ids": ["x", "y", "z"], "question_type": "t"}
    (memory,) = read(json.dumps([{**item, "question": "q", "answer": 7, "answer_session_ids": ["y"]}]))
    assert len(memory.rounds) == 6 and memory.questions[0].gold == (3,) and memory.questions[0].answer == "7"
    near = read(json.dumps([{**item, "questions": ["q"], "answers": ["a"], "answer_session_ids": [["y"]]}]), 85)
    assert [len(dialogue.rounds) for dialogue in near] == [4]
    half = (json.dumps({"prompt": None, "topics": []}), json.dumps(item), json.dumps({"haystack_sessions": None}))
    wrong = (("{", "neither JSON"), ("[[1]]", "no list"), ("[]", "no dialogue"), *((x, "Record 0 of") for x in half))
    for content, says in wrong:
        with pytest.raises(kvjax.UsageError, match=says):
            read(content)


def test_lines_of_dialogues_may_hold_separators_of_unicode(tmp_path):
    # JSON lets them stand in a string as they are, and web pages that people paste are full of them.
    lines = [[*MESSAGES, {"role": "user", "content": f"One\u2028two\u0085{i}"}] for i in range(2)]
    path = tmp_path / "file.jsonl"
    path.write_bytes("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode())
    assert [one.questions[0].text for one in read_dialogues(path, len, 10_000)] == [
        line[-1]["content"] for line in lines
    ]


def test_what_cannot_be_calibrated_on_is_refused():
    pair = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(kvjax.UsageError, match="at least 2 layers"):
        kvjax.calibrate.watershed(toys.tiny_model(num_layers=1), [([*pair, *pair], "q")])
    lm = toys.tiny_model()
    with pytest.raises(kvjax.UsageError, match="A dialogue is a pair"):
        kvjax.calibrate.watershed(lm, [[*pair, *pair]])
    with pytest.raises(kvjax.UsageError, match="A message needs"):
        kvjax.calibrate.watershed(lm, [([*pair, pair[0], {"role": "assistant"}], "q")])
    for texts, sentence in ((["a", None], "A text is to be encoded, and None"), ("one text", "give a list of texts")):
        with pytest.raises(kvjax.UsageError, match=sentence):
            kvjax.calibrate.query_filters(lm, texts)
