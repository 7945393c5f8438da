"""Conversations on disk: a compressed cache saved and loaded as a value, in a form that no platform's layout shapes.

``canonical.py`` says what is written of a cache, ``description.py`` what is written about it (and so what a file may
be loaded into), ``store.py`` how it comes to disk whole or not at all.
"""

from kvjax.saving.store import holds_conversation, load_cache, save_cache

__all__ = ["holds_conversation", "load_cache", "save_cache"]
