"""``kvjax chat --save`` and ``--load``: the folder a conversation is kept in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import kvjax


def check(save: Path | None, load: Path | None, system: str | None) -> None:
    """Refuse folders that will not do, before a model is loaded (UsageError, KvjaxError)."""
    from kvjax.errors import UsageError
    from kvjax.files import check_local
    from kvjax.saving import holds_conversation

    if load is not None:
        check_local("--load", load)
    if load is not None and not holds_conversation(load):
        raise UsageError(f"There is no saved conversation at {load}.")
    if load is not None and system is not None:
        raise UsageError(f"The conversation at {load} has begun, and --system is told before that; leave it out.")
    if save is not None:
        check_free(save, load)


def check_free(save: Path, load: Path | None, name: str = "--save") -> None:
    """Refuse to overwrite any conversation but the one that is continued, or a folder that cannot be written to."""
    from kvjax.errors import UsageError
    from kvjax.files import check_folder, check_local
    from kvjax.saving import holds_conversation

    check_local(name, save)
    if holds_conversation(save) and (load is None or save.resolve() != load.resolve()):
        raise UsageError(
            f"{save} holds a conversation already; continue it with --load {save}, or name another folder to save in."
        )
    check_folder(name, save)


def continued(lm: kvjax.LanguageModel, folder: Path, keywords: dict[str, Any]) -> kvjax.Chat:
    """The conversation of a folder; a policy or storage that was asked for must be its own."""
    import kvjax
    from kvjax.cache.quantisation import parse_storage
    from kvjax.policies import format_policy, parse
    from kvjax.prompts import matching

    options = {name: value for name, value in keywords.items() if name not in ("policy", "storage", "system")}
    conversation = kvjax.Chat.load(folder, lm, **options)
    cache, policy, storage = conversation.cache, keywords["policy"], keywords["storage"]
    assert cache is not None, "a conversation that was loaded has a cache"
    other = policy is not None and matching(lm, parse(policy), cache.policy.named) is None
    for flag, differs, own in (
        ("--policy", other, format_policy(cache.policy)),
        ("--storage", storage is not None and parse_storage(storage).kind != cache.storage.kind, cache.storage.kind),
    ):
        if differs:
            raise kvjax.UsageError(f"The conversation at {folder} goes on with {flag} {own}; leave {flag} out.")
    tokens, named = int(cache.seen[0]), format_policy(cache.policy)
    print(f"The conversation at {folder} goes on after {tokens:,} tokens, with --policy {named}.", file=sys.stderr)
    return conversation


def check_can_be_kept(conversation: kvjax.Chat, name: str) -> None:
    """Refuse to keep a conversation over a context that was read once, before its turns are answered for nothing."""
    from kvjax.errors import UsageError

    cache = conversation.cache
    if cache is not None and cache.policy.chosen_once:
        raise UsageError(
            f"This conversation shares a context that was read with --once and cannot be saved; leave {name} out, or "
            "read the context without --once."
        )


class Record:
    """The folder a conversation is written to after each of its turns, if there is one.

    Attributes:
      folder: the folder, or None.
      written: :attr:`kvjax.Chat.changes` of the conversation that is there.
    """

    def __init__(self, folder: Path | None, written: int = 0):
        self.folder, self.written = folder, written

    def move(self, folder: Path, conversation: kvjax.Chat) -> None:
        """Keep the conversation in another folder from now on, beginning with all of it so far."""
        check_free(folder, self.folder, "/save")
        check_can_be_kept(conversation, "/save")
        self.folder, self.written = folder, 0
        self.keep(conversation)

    def keep(self, conversation: kvjax.Chat) -> bool:
        """Write the conversation if it has changed; return whether Ctrl-C, which waits for that, was pressed."""
        from kvjax.interrupt import interruptible

        if self.folder is None or not conversation.has_begun or conversation.changes == self.written:
            return False
        with interruptible() as interrupt:
            conversation.save(self.folder)
            interrupt.answered = True  # by what this returns
        self.written = conversation.changes
        return interrupt.requested
