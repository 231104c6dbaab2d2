"""Token streams: prompts, samples and their packing, labelled queries, and the embedded default's assets."""

from jaxtool.data.assets import AssetError, bfcl, cache_directory, smollm2
from jaxtool.data.chat import ChatPrompts, PromptIds
from jaxtool.data.query_files import read_queries
from jaxtool.data.query_sets import HeldOut, LabelledQuery, QuerySetError, RetrievalSet, load_retrieval_set
from jaxtool.data.samples import DRAWN, Batch, PackedBatches, Sample

__all__ = [
    "DRAWN",
    "AssetError",
    "Batch",
    "ChatPrompts",
    "HeldOut",
    "LabelledQuery",
    "PackedBatches",
    "PromptIds",
    "QuerySetError",
    "RetrievalSet",
    "Sample",
    "bfcl",
    "cache_directory",
    "load_retrieval_set",
    "read_queries",
    "smollm2",
]
