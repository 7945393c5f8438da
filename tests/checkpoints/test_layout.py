"""Layouts: every row of every tensor fills its place once, whatever the family and the kind of checkpoint."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from flax import nnx
from support import family_cases as cases

from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError
from kvjax.model.decoder import abstract_decoder
from kvjax.model.params import logical_view

BY_NAME = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)


@BY_NAME
def test_every_row_is_read_once_and_every_place_filled_once(case):
    family = FAMILIES[case.config["model_type"]]
    config = family.from_hf(case.config, "config.json")
    params = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(abstract_decoder(config)))}
    counts = {name: np.zeros(x.get_value().shape, int) for name, x in params.items()}
    rows: dict[str, list[int]] = defaultdict(list)
    for weight in family.weights(config, False):
        taken = range(weight.shape[0]) if weight.rows is None else [int(row) for row in weight.rows]
        rows[weight.hf] += taken
        view = weight.place(logical_view(params[weight.param], counts[weight.param]))
        assert view.size == len(taken) * int(np.prod(weight.shape[1:]))
        view += 1
    for name, shape in cases.shapes(case).items():
        assert sorted(rows[name]) == list(range(shape[0])), name
    for name, count in counts.items():
        unused = count.reshape(config.num_kv_heads, -1, config.head_dim)[:, -1] if name.endswith("qk_norm") else None
        assert count.max() == 1 and (unused is None or unused.sum() == 0), name
        assert count.size - count.sum() == (0 if unused is None else unused.size), name


@BY_NAME
def test_a_tensor_that_is_not_there_or_too_many_or_misshapen_is_named(case, tmp_path):
    tensors = cases.values(case, cases.shapes(case))
    name = sorted(tensors)[len(tensors) // 2]
    for what, changed in {
        "lacks": {key: x for key, x in tensors.items() if key != name},
        "does not have": tensors | {"model.layers.0.extra.weight": tensors[name]},
        "configuration asks for": tensors | {name: np.concatenate([tensors[name]] * 2)},
    }.items():
        with pytest.raises(WeightsError, match=what):
            load(cases.write_folder(case, tmp_path / what, changed), progress=False)
