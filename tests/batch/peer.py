"""One process of a job on the tiny model: ``python peer.py ARGUMENTS`` is ``kvjax batch ARGUMENTS``."""

import sys

import toys

import kvjax
from kvjax.cli.main import main

kvjax.load = lambda name, **options: toys.tiny_model()
sys.exit(main(["batch", *sys.argv[1:]]))
