"""A file on a web server, readable and seekable like a local one: HTTP range requests with the standard library."""

from __future__ import annotations

import http.client
import io
import time
import urllib.error
import urllib.request

_RETRIES = 5
_TIMEOUT = 20.0


class RemoteFile(io.RawIOBase):
    """One streamed response while reads are sequential, a new range after a seek.

    A connection that breaks is opened again where it stopped; ``_RETRIES`` failures without a byte between them raise
    OSError, and so does at once a server that cannot be found or refuses the address.
    """

    def __init__(self, url: str, size: int, pause: float = 0.5):
        """``size`` is the file's length in bytes, ``pause`` the seconds before the first retry (then doubling)."""
        self._url, self._size, self._at, self._pause, self._failures = url, size, 0, pause, 0
        self._response: http.client.HTTPResponse | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        if target != self._at:
            self._drop()
        self._at = target
        return target

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while self._at < self._size:
            try:
                if self._response is None:
                    self._response = self._open()
                count = self._response.readinto(buffer)
                if count:
                    self._at, self._failures = self._at + count, 0
                    return count
                raise ConnectionError("the connection closed early")
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                self._failures += 1
                if self._failures >= _RETRIES or _is_final(error):
                    raise OSError(reason(error)) from error
                time.sleep(self._pause * 2 ** (self._failures - 1))
        return 0

    def _open(self) -> http.client.HTTPResponse:
        headers = {"Range": f"bytes={self._at}-", "User-Agent": "kvjax"}
        response = urllib.request.urlopen(urllib.request.Request(self._url, headers=headers), timeout=_TIMEOUT)
        if response.status != 206:
            response.close()
            raise urllib.error.URLError("the server does not answer range requests")
        return response

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
        self._response = None

    def close(self) -> None:
        self._drop()
        super().close()


def _is_final(error: BaseException) -> bool:
    """Asking again would not help: the server is unknown, refuses, or has no such file."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500
    return isinstance(error, urllib.error.URLError)


def reason(error: BaseException) -> str:
    """The shortest readable cause of a failure, without a full stop."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    cause = getattr(error, "reason", None) or error
    return str(getattr(cause, "strerror", None) or cause).strip().rstrip(".") or type(error).__name__
