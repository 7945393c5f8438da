"""Kernels measured on the machine they run on: ``python -m pallas_kernels.bench``, with JAX and NumPy alone.

``problem`` is what is measured (a ragged pool of rows, sizes by flags), ``timing`` how, ``decode`` every implementation
beside what else could do the work, ``report`` the table.
"""

from pallas_kernels.bench import bare as _bare

_bare.stand_in()
