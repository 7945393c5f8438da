"""Attention kernels over ragged, paged, per-head KV caches, for CPU, TPU and GPU. Nothing here imports ``kvjax``.

One folder per operation: ``api`` (the operation, its arguments and their checks), ``reference`` (float32, slow and
obvious), ``xla`` (runs everywhere), and a file for each accelerator backend. ``pages`` is how keys and values lie in
memory, ``dispatch`` how an implementation is chosen.
"""
