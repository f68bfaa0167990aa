"""Hugging Face's BEiT and Data2Vec-Vision, whose attention has a bias for each pair of patches, per block or shared."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ..core.parts import BlockParts
from ..core.tokens import Tokens
from ..errors import DwindleError
from ..settings import Share, Size, Stages
from .hf_base import HuggingFace
from .hf_config import Features, Indices, Tower


class Paired(Tower, total=False):
    vocab_size: Size
    use_mask_token: bool
    use_absolute_position_embeddings: bool
    use_relative_position_bias: bool
    use_shared_relative_position_bias: bool
    layer_scale_init_value: float
    drop_path_rate: Share
    use_mean_pooling: bool
    pool_scales: Stages
    use_auxiliary_head: bool
    auxiliary_loss_weight: float
    auxiliary_channels: Size
    auxiliary_num_convs: Size
    auxiliary_concat_input: bool
    semantic_loss_ignore_index: int
    out_features: Features
    out_indices: Indices
    add_fpn: bool
    reshape_hidden_states: bool


class HuggingFaceBEiT(HuggingFace):
    family = "hf_beit"
    takes = "BEiT and Data2Vec-Vision"
    kinds = (
        *("BeitModel", "BeitForImageClassification", "BeitForMaskedImageModeling", "BeitBackbone"),
        *("Data2VecVisionModel", "Data2VecVisionForImageClassification"),
    )
    plain = Paired

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        eager = ("Data2VecVisionSelfAttention", "BeitSelfAttention")  # the second only in older versions
        if any(type(module).__name__ in eager for module in self.blocks[0].modules()):
            raise DwindleError(
                f"{self.kind} cannot be adapted: it was built with eager attention, which does not call "
                'scaled_dot_product_attention; build it with attn_implementation="sdpa".'
            )

    def embed(self, images: Tensor) -> Tensor:
        embedded: Any = self.tower.embeddings(images)
        return embedded[0] if isinstance(embedded, tuple) else embedded

    def positions(self, images: Tensor) -> Tensor:
        """(rows, columns, 1, H, N, N): the bias that all blocks share, repeated for each patch, or empty without one.
        Only its shape tells `call` the rows and columns, from which a block makes its own bias."""
        rows, columns = self.grid(images)
        bias = images.new_empty(0) if self.shared is None else self.shared((rows, columns))
        return bias.expand(rows, columns, *bias.shape)

    @property
    def shared(self) -> Any:
        """The module that makes the shared bias, in the tower or (by version) in its encoder; None: there is none."""
        names = ("shared_position_bias", "relative_position_bias")
        holders = (self.tower, getattr(self.tower, "encoder", None))
        found = [getattr(holder, name, None) for holder in holders for name in names]
        return next((module for module in found if module is not None), None)

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        assert tokens.positions is not None
        rows, columns, *_ = tokens.positions.shape
        high, wide = self.shape.patch
        bias = tokens.positions[0, 0] if tokens.positions.numel() else None
        newer = "attention_mask" in inspect.signature(type(block).forward).parameters  # the name of newer versions
        return block(
            x,
            resolution=(rows * high, columns * wide),
            **{"attention_mask" if newer else "relative_position_bias": bias},
        )

    def readout(self, stream_BND: Tensor) -> Tensor:
        x = self.normed(stream_BND)
        pooler = getattr(self.tower, "pooler", None)
        pooled: Tensor = x[:, 0] if pooler is None else pooler(x)
        return self.vit.classifier(pooled) if hasattr(self.vit, "classifier") else pooled

    @property
    def read_first(self) -> int | None:
        pools = self.tower.config.use_mean_pooling and getattr(self.tower, "pooler", None) is not None
        return None if pools else 1

    def parts(self, block: Any) -> BlockParts | None:
        return None  # kernels have no bias of pairs, and no keys without a bias beside queries with one
