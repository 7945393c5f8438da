"""The exceptions kvjax raises on purpose: each carries one sentence saying what was wrong and what is accepted."""


class KvjaxError(Exception):
    """A failure while doing what was asked (a corrupt file, a full disk, a missing model); the CLI exits with 1."""


class UsageError(KvjaxError, ValueError):
    """A request that makes no sense as stated (an unknown policy, a ratio of 3); the CLI exits with 2."""


class DoesNotFit(KvjaxError):
    """The planned bytes exceed the device's memory; the sentence names a request that would fit."""


class WeightsError(KvjaxError):
    """A model's file is missing, truncated, corrupt, or does not hold exactly the weights the model needs."""
