"""Hugging Face's masked autoencoders used as encoders: ViT-MAE for images, VideoMAE for videos."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..errors import DwindleError
from ..settings import Share, Size
from .hf_base import HuggingFace
from .hf_config import Tower


class Autoencoder(Tower, total=False):
    decoder_num_attention_heads: Size
    decoder_hidden_size: Size
    decoder_num_hidden_layers: Size
    decoder_intermediate_size: Size
    mask_ratio: Share
    norm_pix_loss: bool
    num_frames: Size
    tubelet_size: Size
    qv_bias: bool
    use_mean_pooling: bool


class HuggingFaceMAE(HuggingFace):
    family = "hf_mae"
    takes = "ViT-MAE"
    kinds = ("ViTMAEModel", "ViTMAEForPreTraining")
    plain = Autoencoder

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        ratio = vit.config.mask_ratio
        if ratio:
            raise DwindleError(
                f"{self.kind} cannot be adapted: its config.mask_ratio = {ratio:g} drops patches before the first "
                "block, as pretraining does; set it to 0 to use it as an encoder."
            )

    def identity_noise(self, images: Tensor) -> Tensor:
        """(B, patches): the noise by which ViT-MAE sorts patches. It rises, so that patches keep their order."""
        rows, columns = self.grid(images)
        return torch.linspace(0, 1, rows * columns, device=images.device).expand(len(images), -1)

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.embeddings(images, noise=self.identity_noise(images), **self.resizing(images))[0]
        return embedded

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return super().request(images, {"noise": self.identity_noise(images), **options})


class HuggingFaceVideoMAE(HuggingFace):
    """Videos, treated as tall images: the rows of patches of the first frames, then those of the next frames..."""

    family = "hf_videomae"
    takes = "VideoMAE"
    kinds = ("VideoMAEModel", "VideoMAEForVideoClassification")
    plain = Autoencoder
    any_size = False

    @property
    def prefix(self) -> int:
        return 0

    def measure(self) -> Shape:
        shape, config = super().measure(), self.tower.config
        times = config.num_frames // config.tubelet_size
        tall = (shape.image[0] * times, shape.image[1])
        return replace(shape, image=tall, token_macs=shape.token_macs * config.tubelet_size)

    def grid(self, images: Tensor) -> tuple[int, int]:
        return self.shape.grid()

    def expected_shape(self, images: Tensor) -> str | None:
        config, (high, wide) = self.tower.config, self.shape.image
        side = high // (config.num_frames // config.tubelet_size)
        wanted = (config.num_frames, self.shape.channels, side, wide)
        fits = images.dim() == 5 and len(images) > 0 and tuple(images.shape[1:]) == wanted
        return None if fits else f"videos (batch, {', '.join(map(str, wanted))})"

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.embeddings(images, None)
        return embedded

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if options.get("bool_masked_pos") is not None:
            raise DwindleError(
                "bool_masked_pos drops patches before the first block, as pretraining does; leave it out."
            )
        return super().request(images, options)

    def normed(self, stream_BND: Tensor) -> Tensor:
        norm: nn.Module | None = self.tower.layernorm
        return stream_BND if norm is None else norm(stream_BND)

    @property
    def read_first(self) -> int | None:
        return None

    def readout(self, stream_BND: Tensor) -> Tensor:
        vit, x = self.vit, self.normed(stream_BND)
        if not hasattr(vit, "classifier"):
            return x.mean(1)
        logits: Tensor = vit.classifier(x[:, 0] if vit.fc_norm is None else vit.fc_norm(x.mean(1)))
        return logits
