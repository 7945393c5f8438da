"""Record choices of reference implementations, for the tests of ``kvjax.DuoAttention`` and ``kvjax.ThinK``.

    python scripts/golden_peers.py DUO KVPRESS

``DUO`` is a checkout of github.com/mit-han-lab/duo-attention (MIT licence), here of fe93c314, and ``KVPRESS`` one of
github.com/NVIDIA/kvpress (Apache 2.0), of 8bb29b9c, whose ThinK was reviewed by the paper's first author. Both are only
read. What runs is their own code, ``sparsify_attention_heads`` of ``duo_attn/utils.py``, ``generate_streaming_mask`` of
``duo_attn/patch/streaming_attn.py`` and ``ThinKPress.compress``, cut out of their files, since the files import much
that these do not use. The first is NumPy already; the others call a few functions of torch, for which NumPy stands in
here: torch is not needed.

``tests/golden/peer_choices.json`` holds, in the order of the cases of ``tests/support/peer_cases.py``: "gates", 1 for
each head, layer after layer, that keeps everything; "streams", for some queries of a streaming head the tokens that
they attend to; "keys", of each head the channels that are not set to 0.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import sys
import types
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import peer_cases as peers  # noqa: E402


class Tensor(np.ndarray):
    """NumPy with the methods of a torch tensor that the official code calls."""

    def to(self, **_: Any) -> Tensor:
        return self

    def unsqueeze(self, dim: int) -> Tensor:
        return np.expand_dims(self, dim).view(Tensor)

    def mean(self, dim: int) -> Tensor:  # type: ignore[override]
        return np.mean(np.asarray(self), axis=dim).view(Tensor)

    def view(self, *shape: Any) -> Any:
        return super().view(*shape) if isinstance(shape[0], type) else self.reshape(shape)

    def topk(self, count: int, dim: int, largest: bool) -> Any:
        order = np.argsort(np.asarray(self) * (-1 if largest else 1), axis=dim, kind="stable")
        return types.SimpleNamespace(indices=np.take(order, range(count), axis=dim).view(Tensor))

    def expand(self, *shape: int) -> Tensor:
        wanted = [old if new == -1 else new for old, new in zip(self.shape, shape, strict=True)]
        return np.broadcast_to(self, wanted).view(Tensor)

    def scatter_(self, dim: int, index: np.ndarray, value: float) -> Tensor:
        np.put_along_axis(self, np.asarray(index), value, axis=dim)
        return self


def stand_in() -> Any:
    """The functions of torch that the official code calls."""

    def ones(*shape: int, dtype: Any) -> Tensor:
        return np.ones(shape, dtype).view(Tensor)

    def triu(x: Tensor, diagonal: int) -> Tensor:
        return np.triu(x, diagonal).view(Tensor)

    def no_grad() -> Any:
        return lambda function: function

    return types.SimpleNamespace(bool=bool, ones=ones, triu=triu, pow=np.power, no_grad=no_grad, Tensor=Tensor)


def official(file: pathlib.Path, name: str, **names: Any) -> Any:
    """A function of a file, or a method, as ``name`` says, run in a module of these names alone."""
    if not file.is_file():
        sys.exit(f"{file} is not there; give the folders of both checkouts")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            space = {"np": np, "torch": stand_in(), "nn": types.SimpleNamespace(Module=object), **names}
            exec(compile(ast.Module([node], []), str(file), "exec"), space)
            return space[name]
    sys.exit(f"{file} has no function {name}")


def kept_channels(compress: Any, tokens: int, dim: int, window: int, leaves: float, seed: int) -> list[list[int]]:
    """Channels of each head that the official method leaves as they are."""
    q, k = peers.queries_and_keys(tokens, dim, window, seed)
    config = types.SimpleNamespace(num_attention_heads=q.shape[1])
    module = types.SimpleNamespace(config=config, head_dim=dim)
    press = types.SimpleNamespace(
        key_channel_compression_ratio=leaves, compute_window_queries=lambda *_: q.view(Tensor)
    )
    given = {"hidden_states": None, "position_embeddings": None}
    found, _ = compress(press, module, None, k.copy().view(Tensor), None, None, given)
    return [np.flatnonzero(head.any(axis=0)).tolist() for head in np.asarray(found[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("duo", type=pathlib.Path)
    parser.add_argument("kvpress", type=pathlib.Path)
    options = parser.parse_args()
    sparsify = official(options.duo / "duo_attn/utils.py", "sparsify_attention_heads")
    mask = official(options.duo / "duo_attn/patch/streaming_attn.py", "generate_streaming_mask")
    compress = official(options.kvpress / "kvpress/presses/think_press.py", "compress")
    heads, streams = [], []
    np.random.seed(0)  # it adds noise to the gates, to break ties
    for layers, count, seed, sparsity in peers.GATES:
        full, _ = sparsify(peers.gates(layers, count, seed), sparsity=sparsity)
        heads.append("".join("01"[int(gate)] for gate in full.ravel()))
    for tokens, sink, recent in peers.STREAMS:
        seen = np.asarray(mask(tokens, sink, recent, "cpu"))[0, 0, :tokens]
        streams.append({query: np.flatnonzero(seen[query]).tolist() for query in peers.asked(tokens)})
    keys = [kept_channels(compress, *case) for case in peers.KEYS]
    peers.CHOICES.write_text(json.dumps({"gates": heads, "streams": streams, "keys": keys}) + "\n")
    print(f"{len(heads)} + {len(streams)} + {len(keys)} cases, {peers.CHOICES.stat().st_size} bytes")


if __name__ == "__main__":
    main()
