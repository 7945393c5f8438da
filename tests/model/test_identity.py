"""Version 0.1 saved conversations with digests of their model, which later fields of a configuration do not change."""

from __future__ import annotations

import pytest
import toys

from kvjax.model.experts import Experts
from kvjax.saving.description import _config_digest, model_identity, same_model

#: Of ``toys.tiny_model()``, by version 0.1.
SAVED = {"config": "aa3657d427904e8a880e8e7e5a81687b", "weights": "780e06352dcd576ea84291894e8614fc"}


def test_a_model_has_the_identity_that_it_was_saved_with():
    lm = toys.tiny_model()
    assert model_identity(lm) == {"name": "tiny", **SAVED}
    same_model({"name": "tiny", **SAVED}, lm)


def test_experts_have_the_identity_that_they_were_saved_with():
    """Of before their projections had biases."""
    config = toys.tiny_config(experts=Experts(4, 2, 16, shared_inner=8, dense_layers=(1,)))
    assert _config_digest(config) == "218ea58dba67e29090c9c27ab34dab48"
    assert toys.tiny_config(experts=Experts(4, 2, 16, biased=True)).identity()["experts"]["biased"]


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"qkv_bias": True}, {"num_kv_heads": 4}, {"max_position": 513}])
def test_another_model_has_another(changes):
    assert toys.tiny_config(**changes).identity() != toys.tiny_config().identity()
    assert changes.items() <= toys.tiny_config(**changes).identity().items()
