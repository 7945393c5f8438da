"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from support import gguf_files

from kvjax.checkpoints import fill


@pytest.fixture
def allocated(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the parameters that are allocated."""
    found, make = [], fill.aligned
    monkeypatch.setattr(fill, "aligned", lambda shape, dtype: found.append(shape) or make(shape, dtype))
    return found


@pytest.fixture
def folder(tmp_path):
    """An untied llama in Hugging Face's form."""
    return gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "model")
