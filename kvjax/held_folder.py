"""A folder that one run alone writes into."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None


@contextlib.contextmanager
def held(name: str, folder: Path) -> Iterator[None]:
    """Make a folder, and be the only run that writes into it: the system forgets a process' hold when it is killed.

    A folder that was made here and in which nothing was written is removed.

    Args:
      name: the flag that names the folder.

    Raises:
      UsageError: another run holds it, or it cannot be made or read.
    """
    with contextlib.ExitStack() as stack:
        try:
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is not None:
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"Another run writes into {folder} now; wait for it, or choose another folder.") from error
        except OSError as error:
            # Some network filesystems hold nothing; there, as on Windows, nobody notices a second run.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise unusable(name, folder, error) from error
        try:
            yield
        finally:
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def unusable(name: str, folder: Path, error: OSError) -> UsageError:
    """The refusal of a folder for what the system says."""
    return UsageError(f"{name} names a folder that cannot be used: {folder} ({error.strerror}).")
