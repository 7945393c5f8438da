"""Every bad input that passes through the command line: one sentence, the right exit code, no traceback."""

from __future__ import annotations

import pytest

USAGE = {
    "empty prompt": ["generate", ""],
    "negative max_new_tokens": ["generate", "hi", "--max-new-tokens", "-1"],
    "ratio above 1": ["generate", "hi", "--policy", "lagkv:ratio=1.5"],
    "ratio 0": ["generate", "hi", "--policy", "lagkv:ratio=0"],
    "ratio nan": ["generate", "hi", "--policy", "lagkv:ratio=nan"],
    "negative sink": ["generate", "hi", "--policy", "lagkv:ratio=0.5,sink=-1"],
    "negative lag": ["generate", "hi", "--policy", "lagkv:ratio=0.5,lag=-8"],
    "budget below sinks and window": ["generate", "hi", "--policy", "streamingllm:sink=8,budget=4"],
    "option without value": ["generate", "hi", "--policy", "lagkv:ratio"],
    "option twice": ["generate", "hi", "--policy", "lagkv:sink=1,sink=2"],
    "option of a wrong kind": ["generate", "hi", "--policy", "lagkv:sink=many"],
    "unknown dtype": ["generate", "hi", "--dtype", "float99"],
    "nan temperature": ["generate", "hi", "--temperature", "nan"],
    "negative temperature": ["generate", "hi", "--temperature", "-1"],
    "top_p 0": ["generate", "hi", "--top-p", "0"],
    "top_p above 1": ["generate", "hi", "--top-p", "1.5"],
    "min_p above 1": ["generate", "hi", "--min-p", "2"],
    "top_k 0": ["generate", "hi", "--top-k", "0"],
    "repetition_penalty 0": ["generate", "hi", "--repetition-penalty", "0"],
    "n 0": ["generate", "hi", "--n", "0"],
    "empty stop": ["generate", "hi", "--stop", ""],
    "stop ids that are words": ["generate", "hi", "--stop-token-ids", "a,b"],
    "stop id beyond the vocabulary": ["generate", "hi", "--stop-token-ids", "100000"],
    "memory limit of a wrong unit": ["generate", "hi", "--memory-limit", "8 parsecs"],
    "context file that is not there": ["generate", "hi", "--context", "@no/such/file"],
    "standard input twice": ["generate", "-", "-"],
    "prompt beyond the context": ["generate", "x" * 600],
    "unknown flag": ["generate", "hi", "--tempratur", "1"],
    "flag of a wrong kind": ["generate", "hi", "--seed", "soon"],
    "unknown command": ["genrate", "hi"],
    "no prompt": ["generate"],
    "plan of nothing": ["plan", "--prompt-tokens", "0"],
    "plan of a negative batch": ["plan", "--prompt-tokens", "8", "--batch", "-1"],
    "unknown peer": ["bench", "--peer", "transfomers"],
    "bench of no rounds": ["bench", "--rounds", "0"],
    "bench of batch 0": ["bench", "--batch", "0"],
    "bench of an unknown shape": ["bench", "decode", "--shape", "llama"],
    "bench of a shape in an unknown dtype": ["bench", "decode", "--shape", "tiny", "--dtype", "float12"],
    "bench of kernels of no rows": ["bench", "kernels", "--batch", "0"],
    "bench of kernels in an unknown dtype": ["bench", "kernels", "--dtype", "float12"],
    "bench of kernels in numbers that no cache holds": ["bench", "kernels", "--dtype", "int32"],
    "bench of kernels with no spread that is a number": ["bench", "kernels", "--sigma", "nan"],
    "sizes of a problem that is none": ["tune", "sizes.json", "--batch", "0"],
    "sizes of an operation that is none": ["tune", "sizes.json", "--operation", "decode"],
    "sizes of no chunk": ["tune", "sizes.json", "--queries", "0"],
    "sizes of a chunk longer than its prompt": ["tune", "sizes.json", "--queries", "512", "--tokens", "256"],
    "sizes saved nowhere": ["tune", "no/such/folder/sizes.json"],
    "bench beyond the context": ["bench", "--context", "100000"],
    "compare of an unknown policy": ["compare", "--out", ".", "--policies", "lagkv,snapvk"],
    "compare of an unknown option": ["compare", "--out", ".", "--policies", "lagkv:lga=3"],
    "compare of a share above 1": ["compare", "--out", ".", "--retained", "0.5,2"],
    "compare of a share that is no number": ["compare", "--out", ".", "--retained", "half"],
    "compare of an unknown task": ["compare", "--out", ".", "--tasks", "niah"],
    "compare of no samples": ["compare", "--out", ".", "--samples", "0"],
    "compare of no length": ["compare", "--out", ".", "--lengths", ","],
    "compare beyond the context": ["compare", "--out", ".", "--lengths", "100000"],
    "compare saved in a file": ["compare", "--out", "pyproject.toml"],
    "compare saved nowhere": ["compare"],
    "unknown picture": ["picture", "razor", "--out", "x.png"],
    "picture of no samples": ["picture", "razor-heads", "--out", "x.png", "--samples", "0"],
    "picture of too large a share": ["picture", "retained-positions", "--out", "x.png", "--ratio", "2"],
    "picture saved nowhere": ["picture", "razor-heads", "--out", "no/such/folder/x.png"],
    "bench saved nowhere": ["bench", "--json", "no/such/folder/result.json"],
    "bench saved in a folder": ["bench", "--json", "."],
    "bench of kernels saved in a folder": ["bench", "kernels", "--json", "."],
    "bench of a shape saved in a folder": ["bench", "decode", "--shape", "tiny", "--json", "."],
    "bench of a negative number of long steps": ["bench", "--long-steps", "-5"],
}


def use_the_real_loader(monkeypatch):
    import kvjax
    from kvjax.checkpoints.load import load

    monkeypatch.setattr(kvjax, "load", load, raising=False)


@pytest.mark.parametrize("arguments", USAGE.values(), ids=USAGE.keys())
def test_usage_errors_are_one_sentence_and_exit_2(cli, monkeypatch, arguments):
    if "--dtype" in arguments:
        use_the_real_loader(monkeypatch)
    ran = cli(*arguments)
    assert ran.sentence
    assert ran.code == 2
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["generate", "hi", "--policy", "lagk"], "lagkv"),
        (["generate", "hi", "--policy", "lagkv:ratoi=0.5"], "ratio"),
        (["chat", "--policy", "streamingllm:snik=1"], "sink"),
        (["plan", "--prompt-tokens", "8", "--policy", "ful"], "full"),
        (["bench", "--peer", "transfomers"], "transformers"),
        (["compare", "--out", ".", "--policies", "streamingllm,lagk"], "lagkv"),
        (["picture", "razor-head", "--out", "x.png"], "razor-heads"),
        (["generate", "hi", "--tempratur", "1"], "--temperature"),
        (["genrate", "hi"], "generate"),
    ],
)
def test_the_nearest_name_is_suggested(cli, arguments, suggestion):
    ran = cli(*arguments)
    assert suggestion in ran.sentence
    assert ran.code == 2


def test_unknown_model(cli, monkeypatch):
    use_the_real_loader(monkeypatch)
    ran = cli("generate", "hi", "--model", "smollm2-135m-instuct")
    assert ran.code == 2
    assert "smollm2-135m-instruct" in ran.sentence


def test_corrupt_model_file_exits_1(cli, monkeypatch, tmp_path):
    use_the_real_loader(monkeypatch)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 40)
    ran = cli("generate", "hi", "--model", str(broken))
    assert ran.code == 1
    assert "broken.gguf" in ran.sentence


def test_standard_input_that_is_not_utf8(cli):
    ran = cli("generate", "-", stdin=b"caf\xe9 au lait")
    assert ran.code == 2
    assert "0xe9 at offset 3" in ran.sentence


def test_argument_that_is_not_utf8(cli):
    ran = cli("generate", b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert ran.code == 2
    assert "UTF-8" in ran.sentence


def test_a_plan_that_does_not_fit_exits_1(cli):
    ran = cli("plan", "--prompt-tokens", "400", "--memory-limit", "1kB")
    assert ran.code == 1
    assert ran.sentence


def test_an_unexpected_failure_is_one_sentence_unless_the_traceback_is_asked_for(cli, monkeypatch):
    import kvjax

    def broken(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(kvjax, "load", broken, raising=False)
    ran = cli("generate", "hi")
    assert ran.code == 1
    assert "first line" in ran.sentence and "KVJAX_TRACEBACK=1" in ran.sentence
    monkeypatch.setenv("KVJAX_TRACEBACK", "1")
    assert "Traceback" in cli("generate", "hi").err


def test_a_full_disk_and_too_little_memory_are_said(cli, monkeypatch):
    import errno

    import kvjax

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def small(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9999 bytes.")

    monkeypatch.setattr(kvjax, "load", full, raising=False)
    ran = cli("generate", "hi")
    assert ran.code == 1 and "disk is full" in ran.sentence
    monkeypatch.setattr(kvjax, "load", small, raising=False)
    ran = cli("generate", "hi")
    assert ran.code == 1 and "Not enough memory" in ran.sentence


def test_interrupted_before_there_is_anything(cli, monkeypatch):
    import kvjax

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvjax, "load", interrupt, raising=False)
    ran = cli("generate", "hi")
    assert ran.code == 130 and ran.sentence == "Interrupted."
