"""The version of kvjax, in its one place: the package's metadata reads this file."""

__version__ = "0.1.0"
