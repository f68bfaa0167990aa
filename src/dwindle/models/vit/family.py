"""What saving, loading, model cards and commands need to know about adapted vision transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...core.backbone import Backbone
from ...core.model import AdaptiveViT
from ...core.registry import Family, discover
from ...io.card import vision_card
from ...io.hub import push_to_hub
from ...io.pretrained import from_pretrained, save_pretrained
from ...ops.int8 import is_int8
from ...runtime.prepared import PreparedViT
from .load import adapted


class VisionTransformers(Family):
    one, many, model = "a vision transformer", "vision transformers", AdaptiveViT
    cli = "dwindle.models.vit.cli"
    commands = {
        "eval": "Accuracy, cost and speed of a checkpoint on a data set.",
        "bench": "Time static against adaptive, turn about in one process; on a GPU against the best of static's "
        "variants.",
        "view": "Draw for each image which patches were computed how far, the plan beside the execution, and the "
        "exits.",
        "report": "One page that explains a trained model: where, when and for which images its tokens stop.",
        "export": "Write a model as one graph from which halted tokens are gone; checked against the model before it "
        "is named.",
        "quantize": "Write a model in int8, for CPUs: a checkpoint like others. With --data both are evaluated.",
        "predict": "Classify millions of images into one parquet file. A killed run goes on where it was: same "
        "command.",
    }

    @property
    def backbones(self) -> list[str]:
        discover("dwindle.backbones")
        return [backbone.family for backbone in Backbone.families]

    def describe(self, model: AdaptiveViT) -> dict[str, Any]:
        described = model.backbone.described or model.backbone.describe() or {"model": None, "options": None}
        config = {
            "backbone": {"family": model.backbone.family, **described},
            "method": {
                "name": type(model.method).__name__,
                "options": model.method.config,
                "trained": model.method.trained,
            },
        }
        if model.dense_head is not None:
            config["head"] = model.dense_head.config
        if model.give_back is not None:
            config["give_back"] = model.give_back.config
        return config | ({"weights": "int8"} if is_int8(model) else {})

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> AdaptiveViT:
        return adapted(folder, config, inner)

    def card(self, config: dict[str, Any], name: str) -> str:
        backbone, method = config["backbone"]["model"] or "a vision transformer", config["method"]["name"]
        summary = f"{backbone} with {method}: tokens stop being computed when they are done."
        return vision_card(config, name, summary)

    def preprocess(self, model: AdaptiveViT) -> dict[str, Any]:
        return model.backbone.preprocess

    def prepare(self, model: AdaptiveViT, **options: Any) -> PreparedViT:
        return PreparedViT(model, **options)

    def push_to_hub(self, model: AdaptiveViT, repo: str, **options: Any) -> str:
        return push_to_hub(model, repo, **options)

    def save_pretrained(self, model: AdaptiveViT, folder: Any, **options: Any) -> Path:
        return save_pretrained(model, folder, **options)

    def from_pretrained(self, source: Any, **options: Any) -> Any:
        return from_pretrained(source, **options)

    def untrained(self) -> list[str]:
        import timm

        return timm.list_models()

    def builds(self, name: str) -> bool:
        import timm

        return timm.is_model(name)
