"""Hugging Face's DINOv3, which has rotary positions, register tokens and gated MLPs."""

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
        """(N, 2 E): cosines beside sines. Prefix tokens are not rotated, so their angle is 0."""
        cos, sin = self.tower.rope_embeddings(images)
        ones = torch.ones_like(cos[:1]).expand(self.prefix, -1)
        return torch.cat([torch.cat([ones, cos]), torch.cat([ones * 0, sin])], -1)

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        assert tokens.positions is not None
        cos, sin = tokens.gather_positions(tokens.positions).chunk(2, -1)
        return block(x, position_embeddings=(cos, sin))

    def parts(self, block: Any) -> None:
        return None  # kernels have no rotary positions, and no keys without a bias beside queries with one
