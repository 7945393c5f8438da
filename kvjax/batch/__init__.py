"""Jobs over files of prompts: read ``batch_run.py`` first; one module each for rows, files and the work.

``kvjax.batch.run(lm, "prompts.jsonl", "answers")`` is ``kvjax batch`` for scripts.
"""

from kvjax.batch.batch_run import Report, run

__all__ = ["Report", "run"]
