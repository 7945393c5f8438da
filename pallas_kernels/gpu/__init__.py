"""Parts that the GPU kernels of several operations share.

``chip``: which GPU a program is compiled for. ``triton_tiles``: loads and products of the Triton kernels.
"""
