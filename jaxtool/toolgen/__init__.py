"""ToolGen: tools as tokens, learned by memorization and retrieval training, found by constrained generation."""

from jaxtool.toolgen.retrieval import Retrieved, ToolRetriever
from jaxtool.toolgen.samples import SampleSet, document_text, memorization_samples, retrieval_samples

__all__ = [
    "Retrieved",
    "SampleSet",
    "ToolRetriever",
    "document_text",
    "memorization_samples",
    "retrieval_samples",
]
