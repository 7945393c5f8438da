"""``python -m kvjax``: the same as the ``kvjax`` command."""

import sys

from kvjax.cli.main import main

sys.exit(main())
