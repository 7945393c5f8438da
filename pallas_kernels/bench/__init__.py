"""Kernels measured on the machine they run on: ``python -m pallas_kernels.bench``, with JAX and NumPy alone.

``decode_inputs`` and ``chunk_inputs`` make the measured problems, ``timing`` measures, ``decode`` compares every
implementation with the alternatives, and ``kernel_report`` renders the table.
"""

from pallas_kernels.bench import bare as _bare

_bare.stand_in()
