"""The suites of ``kvjax eval``: published benchmarks, how each is scored, and one report."""
