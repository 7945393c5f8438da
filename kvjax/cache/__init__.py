"""The compressed cache: a paged ragged pool per layer, as an immutable pytree of budget-sized buffers."""

from kvjax.cache.cache import Cache
from kvjax.cache.continuation import Continuation, concatenate
from kvjax.cache.pool import PAGE_SIZE, LayerCache, empty_layer, pages_for

__all__ = ["PAGE_SIZE", "Cache", "Continuation", "LayerCache", "concatenate", "empty_layer", "pages_for"]
