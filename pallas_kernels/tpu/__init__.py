"""Parts that the TPU kernels of several operations share.

``tiles``: blocks of queries and keys of the causal kernels. ``bfloat16_parts``: float32 products in a matrix unit that
multiplies bfloat16. ``float32_scores``: scores of float32 queries and keys from such products.
"""
