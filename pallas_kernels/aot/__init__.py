"""Kernels compiled by the real compilers of TPUs and GPUs on a machine that has neither; see ``scripts/aot.py``.

``targets`` are chips, ``cases`` what is compiled for them, ``compile`` the process that compiles one target's cases,
``tpu_profile`` and ``gpu`` what is read from a compiler's own dumps, ``report`` the page of results.
"""
