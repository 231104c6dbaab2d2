"""jaxtool teaches language models to use tools, in JAX. Import from its rooms, listed in README.md here."""

__version__ = "0.1.0"
