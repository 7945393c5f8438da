"""An adapter for EleutherAI's lm-evaluation-harness: its tasks, asked of compressed caches.

Importing this package registers the model ``kvjax`` with ``lm_eval``, which the extra ``lm-eval`` installs::

    import kvjax.eval.harness
    import lm_eval

    lm_eval.simple_evaluate(
        model="kvjax", model_args="name=smollm2-135m-instruct,policy=lagkv:ratio=0.25;sink=8", tasks=["arc_easy"]
    )
"""

from __future__ import annotations

from kvjax.errors import KvjaxError, missing_extra

try:
    import lm_eval as lm_eval
except ImportError as error:
    raise KvjaxError(missing_extra("This needs lm-evaluation-harness", "lm-eval")) from error

from kvjax.eval.harness.model import HarnessModel as HarnessModel
