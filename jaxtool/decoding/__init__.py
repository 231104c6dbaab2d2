"""Decoding: the constraint that lets a model name only tools that exist."""

from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie

__all__ = ["DEAD_NODE", "ROOT_NODE", "ToolTrie"]
