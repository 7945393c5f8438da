"""Files written whole or not at all, and refused before there is anything to write."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest

from kvjax.errors import KvjaxError, UsageError
from kvjax.files import check_writable, write_atomically


def test_a_file_that_could_not_be_written_is_refused_beforehand(tmp_path, monkeypatch):
    check_writable("--json", tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="names a folder that does not exist"):
        check_writable("--json", tmp_path / "none" / "new.json")
    with pytest.raises(UsageError, match=r"names a folder, .*; name a file in it"):
        check_writable("--json", tmp_path)

    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(KvjaxError, match=r"new\.json cannot be written: Permission denied\."):
        check_writable("--json", tmp_path / "new.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable("--json", pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "numbers")
    reader.join()
    assert read == ["numbers"]
    assert pipe.is_fifo()
