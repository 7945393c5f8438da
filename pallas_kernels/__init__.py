"""Attention kernels over ragged, paged, per-head KV caches, for CPU, TPU and GPU. Nothing here imports ``kvjax``.

One folder per operation: ``api`` (the operation, its arguments and their checks), ``reference`` (float32, slow and
simple), ``xla`` (runs everywhere), and a file for each accelerator backend. ``tpu`` and ``gpu`` hold what kernels of
several operations share, ``pages`` the memory layouts of keys and values, ``dispatch`` the choice of an implementation.
"""
