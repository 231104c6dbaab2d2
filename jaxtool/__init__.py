"""jaxtool teaches language models to use tools, in JAX. `jaxtool.load` is the short way in, README.md the map."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

if TYPE_CHECKING:
    from jaxtool.weights.pretrained import load


def __getattr__(name: str) -> Any:
    # On first use: importing a room that needs no network shouldn't import all of jax and transformers.
    if name == "load":
        from jaxtool.weights.pretrained import load

        return load
    raise AttributeError(f"module 'jaxtool' has no attribute {name!r}")
