"""ToolGen: tools as tokens, learned by memorization and retrieval training, found by constrained generation."""

from jaxtool.toolgen.name_retrieval import NameRetriever, name_ids
from jaxtool.toolgen.retrieval import Retrieved, ToolRetriever
from jaxtool.toolgen.samples import SampleSet, document_text, memorization_samples, retrieval_samples
from jaxtool.toolgen.stages import Stage, training_stages

__all__ = [
    "NameRetriever",
    "Retrieved",
    "SampleSet",
    "Stage",
    "ToolRetriever",
    "document_text",
    "memorization_samples",
    "name_ids",
    "retrieval_samples",
    "training_stages",
]
