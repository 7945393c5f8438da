"""One process of a job on the tiny model: ``python peer.py ARGUMENTS`` is ``kvjax batch ARGUMENTS``."""

import sys

import toys

import kvjax
from kvjax.cli.main import main


def load(name, mesh=None, **options):
    lm = toys.tiny_model()
    return lm if mesh is None else lm.on(mesh)


kvjax.load = load
sys.exit(main(["batch", *sys.argv[1:]]))
