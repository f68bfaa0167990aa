"""A block as the kernels run it: its weights are folded once, then each pass is five launches over the live rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.parts import BlockParts
from ...ops.rows import Affine, HeadNorm, Rows, add_linear, attend_rows, normed_linear


@dataclass
class FoldedBlock:
    """One block's weights as the kernels take them. The block itself is not changed."""

    qkv: Affine
    proj: Affine
    fc1: Affine
    fc2: Affine
    scale1: Tensor
    scale2: Tensor
    act: str
    heads: int
    scale: float
    norm: HeadNorm | None

    @staticmethod
    @torch.no_grad()
    def of(parts: BlockParts) -> FoldedBlock:
        weight = torch.cat([layer.weight.detach() for layer in parts.qkv])
        biases = [layer.bias.detach() for layer in parts.qkv if layer.bias is not None]
        ones = torch.ones(len(parts.proj.weight), device=weight.device)
        norm = None
        if parts.q_norm is not None and parts.k_norm is not None:
            of_q, of_k = parts.q_norm, parts.k_norm
            norm = HeadNorm(of_q.weight, of_q.bias, of_k.weight, of_k.bias, of_q.eps)
        return FoldedBlock(
            qkv=Affine.of(weight, torch.cat(biases) if biases else None, parts.norm1),
            proj=Affine.of(parts.proj.weight, parts.proj.bias),
            fc1=Affine.of(parts.fc1.weight, parts.fc1.bias, parts.norm2),
            fc2=Affine.of(parts.fc2.weight, parts.fc2.bias),
            scale1=ones if parts.scale1 is None else parts.scale1.detach().float(),
            scale2=ones if parts.scale2 is None else parts.scale2.detach().float(),
            act=parts.act,
            heads=parts.heads,
            scale=parts.scale,
            norm=norm,
        )

    def attend(self, x_RD: Tensor, rows: Rows, longest: int, bias_R: Tensor | None) -> Tensor:
        """Add the attention update to x in place. Returns queries, keys and values of the live rows (T, 3 D).

        longest: tokens of an image, at most. bias_R: added to the scores of each key.
        """
        qkv = normed_linear(x_RD, rows, self.qkv, "none")
        mixed = attend_rows(qkv, rows, self.heads, longest, self.scale, bias_R, self.norm)
        add_linear(x_RD, rows, mixed, self.proj, self.scale1)
        return qkv

    def mlp(self, x_RD: Tensor, rows: Rows, probe_R: Tensor | None, neuron: int) -> None:
        """Add the MLP's update to x in place. probe_R: is set to each row's activation of this hidden neuron."""
        hidden = normed_linear(x_RD, rows, self.fc1, self.act, probe_R, neuron)
        add_linear(x_RD, rows, hidden, self.fc2, self.scale2)
