"""Vision transformers with a method (`core.model.AdaptiveViT`), as one family of models like the others."""

from .family import VisionTransformers

__all__ = ["VisionTransformers"]
