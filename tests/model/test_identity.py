"""Version 0.1 saved conversations with digests of their model, which later fields of a configuration do not change."""

from __future__ import annotations

import pytest
import toys

from kvjax.saving.description import model_identity, same_model

#: Of ``toys.tiny_model()``, by version 0.1.
SAVED = {"config": "aa3657d427904e8a880e8e7e5a81687b", "weights": "780e06352dcd576ea84291894e8614fc"}


def test_a_model_has_the_identity_that_it_was_saved_with():
    lm = toys.tiny_model()
    assert model_identity(lm) == {"name": "tiny", **SAVED}
    same_model({"name": "tiny", **SAVED}, lm)


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"qkv_bias": True}, {"num_kv_heads": 4}, {"max_position": 513}])
def test_another_model_has_another(changes):
    assert toys.tiny_config(**changes).identity() != toys.tiny_config().identity()
    assert changes.items() <= toys.tiny_config(**changes).identity().items()
