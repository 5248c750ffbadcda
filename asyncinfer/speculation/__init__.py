"""Drafts: who proposes the next tokens of an answer, how many, and what became of them."""

from asyncinfer.speculation.counters import DraftCounters, MethodCounts, draft_stats
from asyncinfer.speculation.drafter import MOST_DRAFTED, Drafter
from asyncinfer.speculation.guarded_proposer import GuardedProposer
from asyncinfer.speculation.packed_tokens import TOKEN_BYTES, PackedTokens
from asyncinfer.speculation.prompt_lookup import PromptLookup
from asyncinfer.speculation.speculator import DraftingModel, Speculator
from asyncinfer.speculation.step_costs import DraftCost, StepCosts

__all__ = [
    "MOST_DRAFTED",
    "TOKEN_BYTES",
    "DraftCost",
    "DraftCounters",
    "Drafter",
    "DraftingModel",
    "GuardedProposer",
    "MethodCounts",
    "PackedTokens",
    "PromptLookup",
    "Speculator",
    "StepCosts",
    "draft_stats",
]
