"""Hugging Face's wrapper around a timm model. It delegates to the backbone of the timm model inside."""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from torch import Tensor, nn

from ..core.backbone import Backbone, Shape, backbone_of
from ..core.parts import BlockParts
from ..core.tokens import Tokens
from ..errors import DwindleError, unknown
from ..settings import Classes, options
from .hf_config import Names
from .timm_saved import Named, check_name

KINDS = ("TimmWrapperModel", "TimmWrapperForImageClassification")


class Wrapped(TypedDict, total=False):
    architecture: str
    model_args: Named
    num_labels: Classes
    id2label: Names
    label2id: Names


class HuggingFaceTimm(Backbone):
    family = "hf_timm"
    takes = "TimmWrapper around a timm model taken here"
    has_own_outputs = True
    vit: Any

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.inner = backbone_of(vit.timm_model)
        self.any_size = self.inner.any_size

    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        return "transformers" in sys.modules and type(vit).__name__ in KINDS

    @property
    def blocks(self) -> list[nn.Module]:
        return self.inner.blocks

    def attention(self, block: Any) -> nn.Module:
        return self.inner.attention(block)

    def attentions(self, block: Any) -> list[Any]:
        return self.inner.attentions(block)

    def reads_weight(self, owner: nn.Module, name: str) -> bool:
        return self.inner.reads_weight(owner, name)

    def mlp_in(self, block: Any) -> Any:
        return self.inner.mlp_in(block)

    def install(self) -> None:
        self.inner.install()

    def remove(self) -> None:
        self.inner.remove()

    def embed(self, images: Tensor) -> Tensor:
        return self.inner.embed(images)

    def positions(self, images: Tensor) -> Tensor | None:
        return self.inner.positions(images)

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        return self.inner.call(block, x, tokens)

    def once(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        return self.inner.once(block, x, tokens)

    def rotated(self, block: nn.Module, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return self.inner.rotated(block, q, k, tokens)

    def readout(self, stream_BND: Tensor) -> Tensor:
        return self.inner.readout(stream_BND)

    def normed(self, stream_BND: Tensor) -> Tensor:
        return self.inner.normed(stream_BND)

    def distilled_logits(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.distilled_logits(stream_BND)

    def expected_shape(self, images: Tensor) -> str | None:
        return self.inner.expected_shape(images)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return self.inner.grid(images)

    @property
    def read_first(self) -> int | None:
        return self.inner.read_first

    @property
    def checkpoints(self) -> bool:
        return self.inner.checkpoints

    def _checkpoint(self) -> None:
        self.inner._checkpoint()

    @property
    def changeable(self) -> tuple[Any, ...]:
        return self.inner.changeable

    def measure(self) -> Shape:
        return self.inner.measure()

    def parts(self, block: nn.Module) -> BlockParts | None:
        return self.inner.parts(block)

    @property
    def preprocess(self) -> dict[str, Any]:
        return self.inner.preprocess

    def reset_head(self, classes: int) -> None:
        self.inner.reset_head(classes)
        self.vit.config.num_labels = self.vit.num_labels = classes

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "__call__", {"pixel_values": images, **options}

    def wants_every_depth(self, options: dict[str, Any]) -> bool:
        wanted = options.get("output_hidden_states")
        return bool(self.vit.config.output_hidden_states if wanted is None else wanted)

    def describe(self) -> dict[str, Any] | None:
        inner = self.inner.describe()
        if inner is None or inner["model"] is None:
            return None
        model_args = {name: value for name, value in inner["options"].items() if name != "num_classes"}
        own = {"architecture": inner["model"], "model_args": model_args}
        labels = {"num_labels": self.vit.config.num_labels} if type(self.vit).__name__ == KINDS[1] else {}
        return {"model": type(self.vit).__name__, "options": own | labels}

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise DwindleError(
                'This checkpoint holds a timm model in a Hugging Face wrapper; install: pip install "dwindle[hf]"'
            ) from error
        if described["model"] not in KINDS:
            raise unknown("Hugging Face model", described["model"], KINDS, hint="the checkpoint was saved with it")
        checked = options(described["options"], Wrapped, described["model"])
        check_name(checked.get("architecture", ""))
        kind = getattr(transformers, described["model"])
        return kind(transformers.TimmWrapperConfig(**checked))
