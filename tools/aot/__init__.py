"""Ahead-of-time compilation of kernels and models, for TPUs and GPUs that this machine does not have.

``python -m tools.aot`` compiles every kernel and writes docs/kernels.md; ``python -m tools.aot.mesh`` compiles a model
on meshes of TPUs and writes docs/sharding.md. ``targets`` lists the chips and ``cases`` the programs, ``compile``
compiles one target's cases in a process of its own, ``tpu_profile`` and ``gpu_profile`` read the compilers' dumps, and
``kernels_page`` and ``mesh_page`` render the results.
"""
