"""One process of a command on the tiny model: ``python -m support.peer batch`` is ``kvjax batch``."""

import sys

import toys

import kvjax
from kvjax.cli.main import main


def load(name, mesh=None, **options):
    lm = toys.tiny_model()
    return lm if mesh is None else lm.on(mesh)


kvjax.load = load
kvjax.load_config = lambda name, **options: toys.tiny_config()
sys.exit(main(sys.argv[1:]))
