"""Decoding: cache, sampling, generation in steps, and the constraint that lets a model name only tools that exist."""

from jaxtool.decoding.decode_model import DecodeModel, decode_model
from jaxtool.decoding.generation import Rows, decode, forget, padded, read
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.sampling import RowSampling, Sampling
from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie

__all__ = [
    "DEAD_NODE",
    "ROOT_NODE",
    "DecodeModel",
    "KVCache",
    "RowSampling",
    "Rows",
    "Sampling",
    "ToolTrie",
    "decode",
    "decode_model",
    "forget",
    "padded",
    "read",
]
