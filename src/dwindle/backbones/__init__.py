"""How each family embeds, attends and reads out; no other code knows a family."""

from ..core.backbone import Backbone, Shape, backbone_of

__all__ = ["Backbone", "Shape", "backbone_of"]
