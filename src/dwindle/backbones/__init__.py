"""How one family embeds, attends and reads out; nothing else knows the family."""

from .base import Backbone, Shape, backbone_of

__all__ = ["Backbone", "Shape", "backbone_of"]
