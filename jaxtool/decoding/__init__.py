"""Decoding: cache, sampling, generation in steps; the trie of tool ids and beam search over it."""

from jaxtool.decoding.beam_search import BeamSearch, RankedTools, rank_tools
from jaxtool.decoding.decode_model import DecodeModel, decode_model, prefill
from jaxtool.decoding.generation import Rows, decode, forget, padded, read
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.sampling import RowSampling, Sampling
from jaxtool.decoding.tool_subset import ToolSubset
from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie
from jaxtool.decoding.trie_head import TrieHead

__all__ = [
    "DEAD_NODE",
    "ROOT_NODE",
    "BeamSearch",
    "DecodeModel",
    "KVCache",
    "RankedTools",
    "RowSampling",
    "Rows",
    "Sampling",
    "ToolSubset",
    "ToolTrie",
    "TrieHead",
    "decode",
    "decode_model",
    "forget",
    "padded",
    "prefill",
    "rank_tools",
    "read",
]
