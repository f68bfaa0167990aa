"""How one family embeds, attends and reads out; nothing else knows the family."""

from ..core.backbone import Backbone, Shape, backbone_of

__all__ = ["Backbone", "Shape", "backbone_of"]
