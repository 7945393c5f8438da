"""A model on many devices: what each has of the weights and of the cache, and the programs they run together."""
