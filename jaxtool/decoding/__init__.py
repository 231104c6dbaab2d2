"""Decoding: cache, sampling, generation in steps; the trie of tool ids and beam search over it."""

from jaxtool.decoding.activations import prompt_states
from jaxtool.decoding.beam_search import BeamSearch, RankedTools, rank_tools
from jaxtool.decoding.capture import Capture
from jaxtool.decoding.constraint import Constraint
from jaxtool.decoding.decode_model import DecodeModel, decode_model, prefill
from jaxtool.decoding.engine import Engine
from jaxtool.decoding.generation import decode, padded, read
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.offline_job import OfflineJob, Part, write_arrays
from jaxtool.decoding.offline_progress import OfflineProgress
from jaxtool.decoding.requests import Completion, Request, check_prompt
from jaxtool.decoding.rows import NO_TOOL, UNNAMED, Rows, constrain, forget, keep_rows, resize, stop
from jaxtool.decoding.sampling import RowSampling, Sampling
from jaxtool.decoding.tool_subset import ToolSubset
from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie
from jaxtool.decoding.trie_head import TrieHead

__all__ = [
    "DEAD_NODE",
    "NO_TOOL",
    "ROOT_NODE",
    "UNNAMED",
    "BeamSearch",
    "Capture",
    "Completion",
    "Constraint",
    "DecodeModel",
    "Engine",
    "KVCache",
    "OfflineJob",
    "OfflineProgress",
    "Part",
    "RankedTools",
    "Request",
    "RowSampling",
    "Rows",
    "Sampling",
    "ToolSubset",
    "ToolTrie",
    "TrieHead",
    "check_prompt",
    "constrain",
    "decode",
    "decode_model",
    "forget",
    "keep_rows",
    "padded",
    "prefill",
    "prompt_states",
    "rank_tools",
    "read",
    "resize",
    "stop",
    "write_arrays",
]
