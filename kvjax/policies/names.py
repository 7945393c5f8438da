"""The policies that come with kvjax: their names, and the modules of their classes, which are imported when used.

A new policy is a module of its own and two lines here; ``parse``, ``kvjax policies``, and the names that ``kvjax`` and
``kvjax.policies`` export follow. :data:`CHOICES` are names that stand for one of the policies, chosen for a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers: "X as X" exports a name
    from kvjax.policies.adaptive import AdaptiveHeads as AdaptiveHeads
    from kvjax.policies.ahakv import AhaKV as AhaKV
    from kvjax.policies.best import Best as Best
    from kvjax.policies.chunkkv import ChunkKV as ChunkKV
    from kvjax.policies.compactor import Compactor as Compactor
    from kvjax.policies.compensated import CompensatedRing as CompensatedRing
    from kvjax.policies.criticalkv import CriticalKV as CriticalKV
    from kvjax.policies.duo import DuoAttention as DuoAttention
    from kvjax.policies.expected_attention import ExpectedAttention as ExpectedAttention
    from kvjax.policies.finch import Finch as Finch
    from kvjax.policies.full import Full as Full
    from kvjax.policies.h2o import H2O as H2O
    from kvjax.policies.keydiff import KeyDiff as KeyDiff
    from kvjax.policies.kvzip import KVzip as KVzip
    from kvjax.policies.lagkv import LagKV as LagKV
    from kvjax.policies.learned import Learned as Learned
    from kvjax.policies.merged import Merged as Merged
    from kvjax.policies.nacl import NACL as NACL
    from kvjax.policies.pyramidkv import PyramidKV as PyramidKV
    from kvjax.policies.qfilters import QFilters as QFilters
    from kvjax.policies.razor import Razor as Razor
    from kvjax.policies.razor import RazorAttention as RazorAttention
    from kvjax.policies.round_attention import RoundAttention as RoundAttention
    from kvjax.policies.slimkv import SlimKV as SlimKV
    from kvjax.policies.snapkv import SnapKV as SnapKV
    from kvjax.policies.streaming import StreamingLLM as StreamingLLM
    from kvjax.policies.think import ThinK as ThinK
    from kvjax.policies.tova import TOVA as TOVA

#: "module:class" by the name that is written after ``--policy``.
POLICIES: dict[str, str] = {
    "full": "kvjax.policies.full:Full",
    "streamingllm": "kvjax.policies.streaming:StreamingLLM",
    "lagkv": "kvjax.policies.lagkv:LagKV",
    "h2o": "kvjax.policies.h2o:H2O",
    "tova": "kvjax.policies.tova:TOVA",
    "ahakv": "kvjax.policies.ahakv:AhaKV",
    "razor": "kvjax.policies.razor:RazorAttention",
    "duo": "kvjax.policies.duo:DuoAttention",
    "round": "kvjax.policies.round_attention:RoundAttention",
    "compensated": "kvjax.policies.compensated:CompensatedRing",
    "snapkv": "kvjax.policies.snapkv:SnapKV",
    "pyramidkv": "kvjax.policies.pyramidkv:PyramidKV",
    "slimkv": "kvjax.policies.slimkv:SlimKV",
    "finch": "kvjax.policies.finch:Finch",
    "nacl": "kvjax.policies.nacl:NACL",
    "keydiff": "kvjax.policies.keydiff:KeyDiff",
    "expected_attention": "kvjax.policies.expected_attention:ExpectedAttention",
    "chunkkv": "kvjax.policies.chunkkv:ChunkKV",
    "compactor": "kvjax.policies.compactor:Compactor",
    "kvzip": "kvjax.policies.kvzip:KVzip",
    "qfilters": "kvjax.policies.qfilters:QFilters",
    "learned": "kvjax.policies.learned:Learned",
    "criticalkv": "kvjax.policies.criticalkv:CriticalKV",
    "adaptive": "kvjax.policies.adaptive:AdaptiveHeads",
    "merged": "kvjax.policies.merged:Merged",
    "think": "kvjax.policies.think:ThinK",
}
#: Names that stand for a policy above, by the request: no policies of their own.
CHOICES: dict[str, str] = {
    "best": "kvjax.policies.best:Best",
}
#: Other spellings of those names.
ALIASES: dict[str, str] = {
    "streaming": "streamingllm",
    "streaming_llm": "streamingllm",
    "lag": "lagkv",
    "none": "full",
    "razorattention": "razor",
    "razor_attention": "razor",
    "rounds": "round",
    "roundattention": "round",
    "round_attention": "round",
    "compensated_ring": "compensated",
    "kvzap": "learned",
    "duoattention": "duo",
    "duo_attention": "duo",
    "snap": "snapkv",
    "pyramid": "pyramidkv",
    "slim": "slimkv",
    "chunk": "chunkkv",
    "adakv": "adaptive",
    "ada_kv": "adaptive",
    "adaptive_heads": "adaptive",
    "adaptiveheads": "adaptive",
    "expectedattention": "expected_attention",
}
#: The module of every class, by the class's name; ``Razor`` is short for ``RazorAttention``.
CLASSES: dict[str, str] = {
    name: module for module, _, name in (home.partition(":") for home in (*POLICIES.values(), *CHOICES.values()))
} | {"Razor": "kvjax.policies.razor"}  # fmt: skip
