"""The ``kvjax`` command, and ``python -m kvjax``."""

import sys


def main() -> int:
    """Run the command line and return its exit code, also where Ctrl-C comes before the application is loaded."""
    try:
        from kvjax.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("kvjax: Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
