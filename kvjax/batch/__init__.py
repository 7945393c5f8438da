"""Jobs over files of prompts: read :mod:`kvjax.batch.run` first; one module each for rows, files and the work.

``kvjax.batch.run(lm, "prompts.jsonl", "answers")`` is ``kvjax batch`` for scripts.
"""

from kvjax.batch.run import Report, run

__all__ = ["Report", "run"]
