"""The ``kvjax`` command: a thin layer over the library whose flags are the library's keywords."""
