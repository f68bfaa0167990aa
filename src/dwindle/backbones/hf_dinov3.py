"""Hugging Face's DINOv3: rotary positions, registers, gated MLPs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from ..core.tokens import Tokens
from ..settings import Above0, Share, Size, Within
from .hf_base import HuggingFace
from .hf_config import Features, Indices, Tower


class Rotary(Tower, total=False):
    attention_dropout: Share
    rope_theta: Above0
    query_bias: bool
    key_bias: bool
    value_bias: bool
    proj_bias: bool
    mlp_bias: bool
    layerscale_value: float
    drop_path_rate: Share
    use_gated_mlp: bool
    num_register_tokens: Size | Literal[0]
    pos_embed_shift: float | None
    pos_embed_jitter: float | None
    pos_embed_rescale: Annotated[float, Within(0, 100, over=True)] | None
    out_features: Features
    out_indices: Indices
    apply_layernorm: bool
    reshape_hidden_states: bool
    return_class_token: bool


class HuggingFaceDINOv3(HuggingFace):
    family = "hf_dinov3"
    takes = "DINOv3"
    kinds = ("DINOv3ViTModel", "DINOv3ViTBackbone")
    plain = Rotary

    @property
    def prefix(self) -> int:
        return 1 + self.tower.config.num_register_tokens

    def positions(self, images: Tensor) -> Tensor:
        """(N, 2 E): cosines beside sines; prefix tokens are not turned."""
        cos, sin = self.tower.rope_embeddings(images)
        still = torch.ones_like(cos[:1]).expand(self.prefix, -1)
        return torch.cat([torch.cat([still, cos]), torch.cat([still * 0, sin])], -1)

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        assert tokens.positions is not None
        cos, sin = tokens.placed(tokens.positions).chunk(2, -1)
        return block(x, position_embeddings=(cos, sin))

    def readout(self, stream_BND: Tensor) -> Tensor:
        pooled: Tensor = self.norm(stream_BND[:, 0])
        return pooled

    @property
    def read_first(self) -> int | None:
        return 1

    def parts(self, block: Any) -> None:
        return None  # its keys are turned, and have no bias
