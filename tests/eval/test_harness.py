"""The adapter for lm-evaluation-harness, with the real package: against the model's forward over whole sequences."""

from __future__ import annotations

import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.harness_tasks import with_data

import kvjax
from kvjax.runtime.prefill import logits_of

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the harness is imported
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; the extra lm-eval has it")

from lm_eval.api.instance import Instance  # noqa: E402  not before it is known to be there
from lm_eval.api.registry import get_model  # noqa: E402

from kvjax.eval.harness import HarnessModel  # noqa: E402
from kvjax.eval.harness.arguments import from_text  # noqa: E402
from kvjax.eval.harness.requests import Prompt, batches, question_start  # noqa: E402

STORY = "The keeper of the light walked down to the sea, and counted the boats. "
QUESTIONS = [
    {"text": STORY * 2 + "Who walked?", "choices": [" The keeper", " A boat", " The sea itself"], "gold": 0},
    {"text": STORY + "What was counted?", "choices": [" Boats", " Lights"], "gold": 0},
    {"text": "Why", "choices": ["?", " not?"], "gold": 1},
    {"text": STORY * 3 + "Where to ", "choices": ["go?", "sea."], "gold": 1},
]
TEXTS = [{"text": STORY * 3}, {"text": "A short one."}, {"text": STORY * 9}]
HALF = "lagkv:ratio=0.5,lag=8,sink=4"


def forward(lm, ids, start: int) -> tuple[float, bool]:
    """The log-probability of ``ids[start:]`` and whether each is the likeliest, by one forward over the sequence."""
    logits = np.asarray(logits_of(lm.params, jnp.asarray([ids[:-1]]), jnp.asarray([len(ids) - 1]))[0])[start - 1 :]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    total = sum(float(logprobs[i, token]) for i, token in enumerate(ids[start:]))
    return total, logits.argmax(axis=-1).tolist() == list(ids[start:])


def requests(kind: str, arguments) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    return [(row["text"], choice) for row in QUESTIONS for choice in row["choices"]]


def likelihoods(lm, arguments, **how) -> list[tuple[float, bool]]:
    return HarnessModel(lm, **how).loglikelihood(requests("loglikelihood", arguments), disable_tqdm=True)


def assert_same(one, other, atol: float = 1e-3) -> None:
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
    np.testing.assert_allclose([total for total, _ in one], [total for total, _ in other], atol=atol)


# --- tasks of the harness ---------------------------------------------------------------------------------------


def task(folder, name: str, kind: str, rows, **more) -> dict:
    return with_data(folder, name, {"rows": rows, "config": {"output_type": kind, **more}})


def tasks(folder) -> list[dict]:
    choice = {"doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    whole = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "byte_perplexity"}]}
    answer = {
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [
        task(folder, "choices", "multiple_choice", QUESTIONS, **choice, target_delimiter=""),
        task(folder, "texts", "loglikelihood_rolling", TEXTS, **whole),
        task(folder, "answers", "generate_until", QUESTIONS, **answer),
    ]


def test_the_harness_runs_its_kinds_of_tasks(tiny_model, tmp_path):
    model = HarnessModel(tiny_model, batch_size=4)
    found = lm_eval.simple_evaluate(model=model, tasks=tasks(tmp_path), bootstrap_iters=0, log_samples=True)
    encode = tiny_model.tokenizer.encode
    right = []
    for row, sample in zip(QUESTIONS, found["samples"]["choices"], strict=True):
        text = row["text"].rstrip()  # a trailing blank goes to the continuation
        context = encode(text)
        wanted = [forward(tiny_model, encode(row["text"] + choice), len(context)) for choice in row["choices"]]
        got = [response[0] for response in sample["resps"]]
        assert_same(got, wanted)
        right.append(np.argmax([total for total, _ in wanted]) == row["gold"])
    assert found["results"]["choices"]["acc,none"] == pytest.approx(np.mean(right))
    totals = [forward(tiny_model, [model.prefix_token_id, *encode(row["text"])], 1)[0] for row in TEXTS[:2]]
    got = [sample["resps"][0][0] for sample in found["samples"]["texts"]]
    assert got[:2] == pytest.approx(totals, abs=2e-3)
    size = sum(len(row["text"].encode()) for row in TEXTS)
    assert found["results"]["texts"]["byte_perplexity,none"] == pytest.approx(math.exp(-sum(got) / size), rel=1e-6)
    for row, sample in zip(QUESTIONS, found["samples"]["answers"], strict=True):
        plain = kvjax.generate(tiny_model, row["text"], chat=False, stop="\n", max_new_tokens=9)
        assert sample["resps"][0][0] == plain.text
    assert found["config"]["policy"] == "full" and found["config"]["model_dtype"] == "float32"


def test_the_command_runs_tasks_of_a_folder(tiny_model, tmp_path, monkeypatch, capsys):
    from kvjax.cli.main import main

    asked = []

    def load(name, **how):
        asked.append((name, how))
        return tiny_model

    monkeypatch.setattr("kvjax.eval.harness.model.load", load)
    # JSON is YAML.
    (tmp_path / "choices.yaml").write_text(json.dumps(tasks(tmp_path)[0]), encoding="utf-8")
    flags = ["--include_path", str(tmp_path), "--tasks", "choices", "--limit", "2", "--batch_size", "2"]
    arguments = "name=toy,policy=lagkv:ratio=0.5;lag=8;sink=4,mesh=data=1;model=1"
    assert main(["lm-eval", *flags, "--model_args", arguments]) == 0
    assert "|choices|" in capsys.readouterr().out
    assert asked == [("toy", {"compile_cache": True, "dtype": None, "weights": None, "mesh": "data=1,model=1"})]
    # Results are kept under the model's name where the harness finds it under its own word.
    named = ["--model_args", "pretrained=toy", "--output_path", str(tmp_path / "results")]
    assert main(["lm-eval", *flags, *named]) == 0
    assert [one.name for one in (tmp_path / "results").iterdir()] == ["toy"]
    assert asked[1][0] == "toy"
    for words, said in (
        (["--tasks", "nowhere", "--model_args", "name=toy"], "kvjax: lm-evaluation-harness refuses this: Tasks not"),
        ([*flags, "--model_args", "name=toy,policy=lagkv:ratio=0.5,lag=8"], "kvjax: The model kvjax takes no 'lag'"),
    ):
        assert main(["lm-eval", *words]) in (1, 2)
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(said)
    assert main(["lm-eval", "--harness-help"]) == 0
    assert "--num_fewshot" in capsys.readouterr().out


# --- scores -----------------------------------------------------------------------------------------------------


def test_batches_and_policies_that_keep_everything_change_nothing(tiny_model):
    wanted = likelihoods(tiny_model, pairs())
    for how in ({"batch_size": 4}, {"policy": "lagkv:ratio=1,lag=8,sink=4", "batch_size": 3}, {"way": "decode"}):
        assert_same(likelihoods(tiny_model, pairs(), **how), wanted)


def test_a_policy_compresses_the_prompt_before_the_continuation_is_scored(tiny_model):
    full = likelihoods(tiny_model, pairs(), batch_size=4)
    found = likelihoods(tiny_model, pairs(), policy=HALF.replace(",", ";"), batch_size=4)
    assert_same(found, likelihoods(tiny_model, pairs(), policy=HALF))
    encode = tiny_model.tokenizer.encode
    for (context, continuation), (total, greedy), (other, _) in zip(pairs()[:5], found, full, strict=False):
        direct = kvjax.score(tiny_model, encode(context), encode(continuation), policy=HALF)
        assert (total, greedy) == (pytest.approx(direct.total, abs=1e-3), direct.is_greedy)
        assert abs(total - other) > 1e-3


def test_greedy_flags(tiny_model):
    context = tiny_model.tokenizer.encode(STORY)
    for policy in ("full", HALF):
        made = list(kvjax.generate(tiny_model, context, policy=policy, max_new_tokens=5).tokens)
        asked = [(None, context, made), (None, context, made[:1]), (None, context, [*made[:-1], (made[-1] + 1) % 256])]
        found = HarnessModel(tiny_model, policy=policy, way="decode", batch_size=3)._loglikelihood_tokens(asked)
        assert [greedy for _, greedy in found] == [True, True, False]
        # Read as one chunk nothing is evicted on the way, which only the full cache does not see.
        found = HarnessModel(tiny_model, policy=policy)._loglikelihood_tokens(asked)
        assert found[1][1] and not found[2][1] and (found[0][1] or policy != "full")


def test_a_pair_is_encoded_as_a_whole(tmp_path):
    """Trailing blanks of the context are the continuation's, and the boundary is where the context's tokens end."""
    lm = toys.needle_model()
    model, encode = HarnessModel(lm), lm.tokenizer.encode
    context, continuation = "One of the special magic  ", "numbers for"
    before, after = model._encode_pair(context, continuation)
    assert before == encode("One of the special magic") and before + after == encode(context + continuation)
    assert lm.tokenizer.decode(after) == "  numbers for"
    assert encode(" numbers") != [*encode(" "), *encode("numbers")]  # or the rule would not be seen
    (found,) = likelihoods(lm, [(context, continuation)])
    assert_same([found], [forward(lm, before + after, len(before))])


def test_an_empty_context_is_the_prefix_token(tiny_model):
    model = HarnessModel(tiny_model)
    assert model.prefix_token_id == model.eot_token_id == tiny_model.tokenizer.encode("<|end|>")[0]
    ids = tiny_model.tokenizer.encode(" you")
    (found,) = likelihoods(tiny_model, [("", " you")])
    assert_same([found], [forward(tiny_model, [model.prefix_token_id, *ids], 1)])


def test_texts_roll_through_windows(tiny_model):
    """Each token is scored once, after as much as fits; what the policy evicts is seen token by token alone."""
    ids = tiny_model.tokenizer.encode(TEXTS[2]["text"])[:100]
    text = tiny_model.tokenizer.decode(ids)

    def rolled(**how) -> list[float]:
        asked = requests("loglikelihood_rolling", [(text,), ("",), ("You",)])
        return HarnessModel(tiny_model, max_length=40, **how).loglikelihood_rolling(asked)

    whole = [tiny_model.tokenizer.encode("<|end|>")[0], *ids]
    windows = (whole[:41], 1), (whole[40:81], 1), (whole[60:101], 21)
    wanted = sum(forward(tiny_model, window, start)[0] for window, start in windows)
    found = rolled()
    assert found[0] == pytest.approx(wanted, abs=2e-3) and found[1] == 0.0 and found[2] < 0.0
    evicting = "streamingllm:budget=20"
    assert rolled(way="decode", batch_size=4) == pytest.approx(found, abs=2e-3)
    assert abs(rolled(way="decode", policy=evicting)[0] - found[0]) > 1e-2


def test_long_prompts_lose_their_beginning(tiny_model, caplog):
    ids = tiny_model.tokenizer.encode(STORY)
    model = HarnessModel(tiny_model, max_length=32)
    found = model._loglikelihood_tokens([(None, ids, [5, 6, 7])])
    assert_same(found, [forward(tiny_model, [*ids[-30:], 5, 6, 7], 30)])
    assert "1 of 1 prompts lose their beginning" in caplog.text
    with pytest.raises(kvjax.UsageError, match="40 tokens"):
        model._loglikelihood_tokens([(None, ids, [5] * 40)])


# --- the question apart -----------------------------------------------------------------------------------------


def test_the_question_is_read_after_the_compression(tiny_model):
    asked = [
        (f"{STORY}{STORY}Question: {question}", choice) for question in ("Who?", "What?") for choice in (" A", " B")
    ]
    apart = {"question_separator": "Question:"}
    for size in (1, 4):
        assert_same(likelihoods(tiny_model, asked, **apart, batch_size=size), likelihoods(tiny_model, asked))
    cache = kvjax.read(tiny_model, tiny_model.tokenizer.encode(STORY + STORY), policy=HALF)
    rests = [tiny_model.tokenizer.encode(text[2 * len(STORY) :]) for text, _ in asked]
    direct = kvjax.score(tiny_model, rests, [choice for _, choice in asked], cache=cache)
    found = likelihoods(tiny_model, asked, **apart, policy=HALF, batch_size=4)
    assert_same(found, [(one.total, one.is_greedy) for one in direct])
    in_view = likelihoods(tiny_model, asked, policy=HALF)
    assert abs(found[0][0] - in_view[0][0]) > 1e-3
    other = [(text.replace("Who", "Why"), choice) for text, choice in asked[:1]] + [(f"{STORY}Question: Oh?", " B")]
    mixed = likelihoods(tiny_model, other, **apart, policy=HALF, batch_size=4)  # nothing in common: a row each
    assert_same(mixed, likelihoods(tiny_model, other, **apart, policy=HALF))
    for text, said in (("No such word.", "has no 'Question:'"), ("Question: Who?", "nothing before 'Question:'")):
        with pytest.raises(kvjax.UsageError, match=said):
            likelihoods(tiny_model, [(text, " A")], **apart)
    with pytest.raises(kvjax.UsageError, match="question alone fills"):
        likelihoods(tiny_model, asked, **apart, max_length=12)
    answers = requests("generate_until", [(text, {"until": ["\n"], "max_gen_toks": 5}) for text, _ in asked[::2]])
    texts = HarnessModel(tiny_model, **apart, policy=HALF, batch_size=2).generate_until(answers)
    outputs = kvjax.generate(tiny_model, rests[::2], cache=cache, stop="\n", max_new_tokens=5)
    assert texts == [output.text for output in outputs]


def test_a_token_that_reaches_into_the_question_belongs_to_it():
    def encode(text: str) -> list[int]:
        return [len(word) for word in text.replace("d Q", "dQ").split(" ")]

    text = "and so it ended Question: who"
    assert question_start(encode, text, encode(text), "Question:") == 3


def test_batches_share_what_is_compressed():
    prompts = [Prompt(i, (), (1, 2, i // 3), (i,)) for i in range(7)]
    found = batches(prompts, 2)
    assert [(batch.shared, [one.number for one in batch.prompts]) for batch in found] == [
        (True, [0, 1]), (True, [2]), (True, [3, 4]), (True, [5]), (False, [6])
    ]  # fmt: skip
    assert not any(batch.shared for batch in batches(prompts, 1))
    answered = [Prompt(i, (), (1, 2)) for i in range(3)]  # samples of one prompt differ
    assert [batch.shared for batch in batches(answered, 4)] == [False]


# --- answers ----------------------------------------------------------------------------------------------------


def test_answers_end_and_are_sampled_as_the_task_says(tiny_model):
    text = STORY * 2
    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 200, "max_gen_toks": 12}
    asked = [(text, {"max_gen_toks": 12, "temperature": 0.0, "until": []})] + [(text, sampled)] * 3
    found = [
        HarnessModel(tiny_model, batch_size=size).generate_until(requests("generate_until", asked)) for size in (1, 3)
    ]
    assert found[0] == found[1]  # samples too, whatever the batch
    assert found[0][0] == kvjax.generate(tiny_model, text, chat=False, max_new_tokens=12).text
    assert len(set(found[0][1:])) == 3  # repeats of one prompt are samples of their own
    number, stop = next((i, char) for i, one in enumerate(found[0]) for char in one[1:] if char.isascii())
    asked[number] = (text, {**sampled, "until": stop})
    ended = HarnessModel(tiny_model).generate_until(requests("generate_until", asked))
    assert ended[number] == found[0][number].split(stop)[0] != found[0][number]
    again = HarnessModel(tiny_model, seed=5).generate_until(requests("generate_until", asked[1:]))
    assert again[1:] != found[0][2:]


def test_generation_kwargs(tiny_model):
    from kvjax.eval.harness.generation_kwargs import options_of

    settings = HarnessModel(tiny_model, policy=HALF, seed=3).settings

    def options(**kwargs) -> kvjax.GenerationOptions:
        return options_of(kwargs, tiny_model, settings)

    assert options().max_new_tokens == 256 and options().temperature == 0.0 and options().seed == 3
    assert options().policy == kvjax.policies.parse(HALF)
    assert options(do_sample=False, temperature=0.7).temperature == 0.0
    assert options(do_sample=True).temperature == 1.0 and options(temperature=0.3).temperature == 0.3
    assert options(top_k=0, num_beams=1, do_sample=None).top_k is None
    ended = options(until=["<|end|>", "", "stop", "<|end|> x"])
    assert ended.stop == ["stop", "<|end|> x"] and ended.stop_token_ids == tiny_model.tokenizer.encode("<|end|>")
    for bad in ({"num_beams": 4}, {"until": 3}, {"until": [3]}, {"max_gen_toks": "many"}, {"typical_p": 0.5}):
        with pytest.raises(kvjax.UsageError):
            options(**bad)
    with pytest.raises(kvjax.UsageError, match="leaves none for"):
        HarnessModel(tiny_model, max_length=20).generate_until(requests("generate_until", [("a", {})]))


def test_chats_use_the_models_template(tiny_model):
    model = HarnessModel(tiny_model)
    user, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}
    assert model.apply_chat_template([user]) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    left_open = model.apply_chat_template([user, begun], add_generation_prompt=False)
    assert left_open == "<|start|>user\nHi<|end|>\n<|start|>assistant\nWell,"
    assert model.chat_template(True) == tiny_model.tokenizer.chat_template and model.chat_template(False) is None
    assert model.tokenizer_name == "tiny"
    with pytest.raises(kvjax.UsageError, match="default chat template"):
        model.chat_template("tool_use")


# --- arguments --------------------------------------------------------------------------------------------------


def test_arguments_as_text_json_or_values(tiny_model, monkeypatch):
    monkeypatch.setattr("kvjax.eval.harness.model.load", lambda name, **_: tiny_model)
    written = (
        "name=toy, policy=lagkv:ratio=0.5;lag=8;sink=4,batch_size=4,max_length=64,compile_cache=False",
        '{"name": "toy", "policy": "lagkv:ratio=0.5,lag=8,sink=4", "batch_size": 4, "max_length": "64"}',
    )
    for text in written:
        # What the harness's own command line adds does not win.
        model = get_model("kvjax").create_from_arg_string(text, {"batch_size": 1, "device": "cuda:0"})
        assert isinstance(model, HarnessModel) and model.max_length == 64 and model.settings.batch_size == 4
        assert model.get_model_info()["policy"] == "lagkv:ratio=0.5,sink=4,lag=8"
    assert get_model("kvjax").create_from_arg_obj({"name": "toy"}, {"batch_size": 3}).settings.batch_size == 3
    assert from_text("policy=razor:inner=lagkv(lag=8;sink=2);ratio=0.5")["policy"].count(";") == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "policy=full", "name=toy,pretrained=gpt2", "name=toy,policy=lagkv:ratio=0.5,lag=8", "name=toy,way=both",
        "name=toy,policy=nothing", "name=toy,policy=lagkv:ratio=2",
        "name=toy,batch_size=auto", "name=toy,batch_size=0", "name=toy,max_length=1",
        "name=toy,max_length=100000", "name=toy,storage=int3", "name=toy,seed=-1", "name", "name=",
        "name=toy,name=toy", "{", '{"name": "toy", "x": 1}', '{"name": "toy", "question_separator": ""}',
        '{"name": "toy", "policy": 3}', "name=toy,compile_cache=perhaps",
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_one_sentence(tiny_model, monkeypatch, text):
    monkeypatch.setattr("kvjax.eval.harness.model.load", lambda name, **_: tiny_model)
    with pytest.raises(kvjax.UsageError) as caught:
        HarnessModel.create_from_arg_string(text)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300
