"""The compressed cache: a paged ragged pool per layer, as an immutable pytree of budget-sized buffers."""

from kvjax.cache.cache import Cache, concatenate
from kvjax.cache.pool import PAGE_SIZE, LayerCache, empty_layer, pages_for

__all__ = ["PAGE_SIZE", "Cache", "LayerCache", "concatenate", "empty_layer", "pages_for"]
