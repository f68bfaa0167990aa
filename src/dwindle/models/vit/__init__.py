"""Vision transformers with a method (`core.model.AdaptiveViT`), registered as a family of models."""

from .family import VisionTransformers

__all__ = ["VisionTransformers"]
