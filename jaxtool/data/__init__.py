"""Token streams: prompts, corpora, conversations, samples and their packing, labelled queries, and assets."""

from jaxtool.data.assets import AssetError, bfcl, cache_directory, smollm2
from jaxtool.data.chat import ChatPrompts, PromptIds
from jaxtool.data.chat_files import ChatFiles
from jaxtool.data.chat_samples import ChatEncoder, chat_samples
from jaxtool.data.chat_template import ChatTemplate
from jaxtool.data.corpus import corpus_samples
from jaxtool.data.documents import Documents
from jaxtool.data.labelled_files import load_labelled, load_labelled_folder
from jaxtool.data.packing import BatchShape, PackedBatches
from jaxtool.data.prompt_rows import PromptEncoder, PromptLine, PromptRow, read_prompt_lines
from jaxtool.data.query_files import QUERY_FORMATS, Query, check_readable, read_query_lines
from jaxtool.data.query_sets import HeldOut, LabelledQuery, QuerySetError, RetrievalSet, load_retrieval_set
from jaxtool.data.sample_writer import PreparedSamples, SampleError, SampleWriter
from jaxtool.data.samples import DRAWN, Batch, Sample, SampleArrays

__all__ = [
    "DRAWN",
    "QUERY_FORMATS",
    "AssetError",
    "Batch",
    "BatchShape",
    "ChatEncoder",
    "ChatFiles",
    "ChatPrompts",
    "ChatTemplate",
    "Documents",
    "HeldOut",
    "LabelledQuery",
    "PackedBatches",
    "PreparedSamples",
    "PromptEncoder",
    "PromptIds",
    "PromptLine",
    "PromptRow",
    "Query",
    "QuerySetError",
    "RetrievalSet",
    "Sample",
    "SampleArrays",
    "SampleError",
    "SampleWriter",
    "bfcl",
    "cache_directory",
    "chat_samples",
    "check_readable",
    "corpus_samples",
    "load_labelled",
    "load_labelled_folder",
    "load_retrieval_set",
    "read_prompt_lines",
    "read_query_lines",
    "smollm2",
]
