"""A user's file, read by a type checker alone: ``test_options.py`` compares what it reveals with the comments."""

from typing import Any, reveal_type

import kvjax


def user(lm: kvjax.LanguageModel, ids: list[int], messages: list[dict[str, str]], samples: int, made: dict[str, Any]):
    reveal_type(kvjax.generate(lm, "text"))  # Output
    reveal_type(kvjax.generate(lm, ids))  # Output
    reveal_type(kvjax.generate(lm, messages, temperature=0.5, policy="lagkv"))  # Output
    reveal_type(kvjax.generate(lm, [{"role": "user", "content": "Hi"}]))  # Output
    reveal_type(kvjax.generate(lm, ["a", "b"]))  # list[Output]
    reveal_type(kvjax.generate(lm, [ids, ids]))  # list[Output]
    reveal_type(kvjax.generate(lm, [messages]))  # list[Output]
    reveal_type(kvjax.generate(lm, ["a", ids, messages]))  # list[Output]
    options = kvjax.GenerationOptions(policy=kvjax.LagKV(ratio=0.25), top_k=4)
    reveal_type(kvjax.generate(lm, "text", options, seed=1))  # Output
    reveal_type(kvjax.generate(lm, ["a"], options=options))  # list[Output]
    reveal_type(kvjax.generate(lm, "text", n=3))  # list[Output]
    reveal_type(kvjax.generate(lm, ["a"], n=3))  # list[list[Output]]
    reveal_type(kvjax.generate(lm, "text", n=samples))  # Output | list[Output]
    reveal_type(kvjax.generate(lm, ["a"], n=samples))  # list[Output] | list[list[Output]]
    output = kvjax.generate(lm, "text", **made)
    reveal_type(kvjax.generate(lm, "more", cache=output.cache, consume_cache=True).text)  # str
    caches = [output.cache for output in kvjax.generate(lm, [ids, ids])]
    reveal_type(kvjax.generate(lm, [ids, ids], cache=caches, options=options))  # list[Output]
    reveal_type([piece.text for piece in kvjax.stream_generate(lm, "text", max_new_tokens=4)])  # list[str]
    reveal_type(kvjax.Chat(lm, options, system="Be brief.", logprobs=True).send("Hi"))  # Output
    reveal_type(kvjax.score(lm, "text", " more", options, policy="full"))  # Any
    kvjax.generate(lm, "text", cache=kvjax.read(lm, "text", options, once=True, progress=False))
    kvjax.batch.run(lm, "in.jsonl", "out", options, policy="full", progress=False)
    reveal_type(kvjax.Full())  # Full


def mistaken(lm: kvjax.LanguageModel):
    kvjax.generate(lm, "text", temperature="hot")  # refused
    kvjax.generate(lm, "text", tempratur=1.0)  # refused
    kvjax.stream_generate(lm, "text", n=2)  # refused
    kvjax.Chat(lm, chat=False)  # refused
    kvjax.read(lm, "text", temperature=0.5)  # refused
    kvjax.score(lm, "text", " more", max_new_tokens=3)  # refused
    kvjax.batch.run(lm, "in.jsonl", "out", reserve_tokens=3)  # refused
    kvjax.Engine(lm).submit("text", policy="full")  # refused
