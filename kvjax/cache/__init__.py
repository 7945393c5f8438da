"""The compressed cache: a paged ragged pool per layer, as an immutable pytree of budget-sized buffers."""

from kvjax.cache.pool import PAGE_SIZE, LayerCache, empty_layer, pages_for
from kvjax.cache.value import Cache, concatenate

__all__ = ["PAGE_SIZE", "Cache", "LayerCache", "concatenate", "empty_layer", "pages_for"]
