"""Policies: which tokens a compressed cache keeps. ``parse`` reads the command line's form."""

from kvjax.policies.ahakv import AhaKV
from kvjax.policies.base import Policy, PromptChunk, Signals, Step
from kvjax.policies.compensated import CompensatedRing
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.full import Full
from kvjax.policies.h2o import H2O
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.lagkv import LagKV
from kvjax.policies.nacl import NACL
from kvjax.policies.pyramidkv import PyramidKV
from kvjax.policies.razor import Razor, RazorAttention
from kvjax.policies.registry import format_policy, parse, register, registry
from kvjax.policies.round_attention import RoundAttention
from kvjax.policies.slimkv import SlimKV
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.streaming import StreamingLLM
from kvjax.policies.tova import TOVA

__all__ = [
    "H2O",
    "NACL",
    "TOVA",
    "AhaKV",
    "CompensatedRing",
    "ExpectedAttention",
    "Full",
    "KeyDiff",
    "LagKV",
    "Policy",
    "PromptChunk",
    "PyramidKV",
    "Razor",
    "RazorAttention",
    "RoundAttention",
    "Signals",
    "SlimKV",
    "SnapKV",
    "Step",
    "StreamingLLM",
    "format_policy",
    "parse",
    "register",
    "registry",
]
