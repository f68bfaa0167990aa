"""AHT-ViT's planner and supervisor on live rows, in a few launches where plain PyTorch needs dozens.

The definitions are lines of the method itself (methods/aht.py). Each `_ref` repeats them on the dense (B, N) tensors
that the kernels write.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import planner_triton
from .launch import available, interpreted, overlapping, power_of_two, precision
from .rows import Rows, compact_ref, few, listed


def image_mean_ref(x_BND: Tensor, rows: Rows) -> Tensor:
    """(B, D): mean over the live rows of each image; 0 for an image with none."""
    images, tokens, width = x_BND.shape
    live = rows.live()
    sums = torch.zeros(images, width, device=x_BND.device)
    sums.index_add_(0, live // tokens, x_BND.reshape(-1, width)[live].float())
    return (sums / rows.starts.diff().clamp_min(1)[:, None]).to(x_BND.dtype)


def image_mean(x_BND: Tensor, rows: Rows) -> Tensor:
    """`image_mean_ref` by a kernel."""
    if not available(x_BND):
        return image_mean_ref(x_BND, rows)
    images, _, width = x_BND.shape
    mean = x_BND.new_empty(images, width)
    planner_triton.image_mean_kernel[(images, -(-width // 64))](
        x_BND,
        rows.rows_R,
        rows.starts,
        mean,
        width,
        BT=32,
        BD=64,
        num_warps=4,
        **overlapping(x_BND, x_BND[..., 0].numel()),
    )
    return mean


class Plan(NamedTuple):
    """The inputs of a plan: the planner's weights, its running moments, and settings of the method."""

    token: Tensor  # (hidden, D)
    context: Tensor  # (hidden, D), for the mean over the image
    bias: Tensor  # (hidden)
    out: Tensor  # (hidden)
    shift: Tensor  # (1)
    mean: Tensor  # of the planner's output, running
    deviation: Tensor
    bar: Tensor  # a scalar, or (B,)
    softness: float
    layer: int  # of the planner
    blocks: int  # L


def plan_ref(x_BND: Tensor, rows: Rows, mean_BD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(B, N) each, on live rows: the standing, which is relu(W x + C mean + b) . w + c minus the running mean, over the
    running deviation; and the planned depth, layer + (L - layer) sigmoid((standing - bar) / softness)."""
    images, tokens, width = x_BND.shape
    live = rows.live()
    context = mean_BD.float() @ plan.context.float().T + plan.bias.float()
    hidden = x_BND.reshape(-1, width)[live].float() @ plan.token.float().T + context[live // tokens]
    value = torch.relu(hidden) @ plan.out.float() + plan.shift.float()
    standing = (value - plan.mean.float()) / plan.deviation.float()
    bar = plan.bar.float()
    go = torch.sigmoid((standing - (bar[live // tokens] if bar.dim() else bar)) / plan.softness)
    dense = torch.zeros(2, images * tokens, device=x_BND.device)
    dense[0, live] = standing
    dense[1, live] = plan.layer + (plan.blocks - plan.layer) * go
    return dense[0].view(images, tokens), dense[1].view(images, tokens)


def plan(x_BND: Tensor, rows: Rows, mean_BD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """`plan_ref` by a kernel."""
    if not available(x_BND) or len(plan.token) > 256:
        return plan_ref(x_BND, rows, mean_BD, plan)
    images, tokens, width = x_BND.shape
    standing, planned = torch.empty(2, images, tokens, device=x_BND.device)
    capacity, hidden = images * tokens, len(plan.token)
    block = 16 if capacity < 4096 else 64
    planner_triton.plan_kernel[(-(-capacity // block),)](
        x_BND,
        rows.rows_R,
        rows.count,
        mean_BD,
        plan.token,
        plan.context,
        plan.bias,
        plan.out,
        plan.shift,
        plan.mean,
        plan.deviation,
        plan.bar,
        standing,
        planned,
        plan.softness,
        plan.layer,
        plan.blocks,
        tokens,
        width,
        hidden,
        PER_IMAGE=plan.bar.dim() > 0,
        PRECISION=precision(x_BND),
        BM=block,
        BH=power_of_two(hidden, 16),
        BK=64 if hidden <= 128 and not interpreted() else 32,
        num_warps=4,
        **overlapping(x_BND, capacity),
    )
    return standing, planned


class Halt(NamedTuple):
    """The settings of scores, and the threshold at whose sum a token halts."""

    gamma: Tensor
    beta: Tensor
    follow: float
    layer: int
    threshold: float | Tensor  # one for all images, or (B,)
    prefix: int  # the number of tokens that never halt


def halt_ref(
    probe_BN: Tensor, plan_BN: Tensor, sum_BN: Tensor, live_BN: Tensor, rule: Halt, forced_BN: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """(B, N) scores sigmoid(gamma (probe + follow (layer - plan)) + beta), their sums, which rows go on, and the list
    of these. forced: the depths of tokens, which replace the decision."""
    score = torch.sigmoid(rule.gamma * (probe_BN.float() + rule.follow * (rule.layer - plan_BN)) + rule.beta)
    total = sum_BN + score
    limit = rule.threshold[:, None] if isinstance(rule.threshold, Tensor) else rule.threshold
    keep = total < limit if forced_BN is None else forced_BN > rule.layer
    if forced_BN is None:
        keep[:, : rule.prefix] = True
    rows, live = compact_ref(live_BN, keep)
    return score, total, live, rows


def halt(
    probe_BN: Tensor, plan_BN: Tensor, sum_BN: Tensor, live_BN: Tensor, rule: Halt, forced_BN: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """`halt_ref` by one kernel, or two for many images."""
    if not available(probe_BN):
        return halt_ref(probe_BN, plan_BN, sum_BN, live_BN, rule, forced_BN)
    images, tokens = probe_BN.shape
    score, total, new = torch.empty_like(sum_BN), torch.empty_like(sum_BN), torch.empty_like(live_BN)
    counts, starts, rows = (
        torch.empty(n, dtype=torch.int32, device=new.device) for n in (images, images + 1, new.numel())
    )
    per_image = isinstance(rule.threshold, Tensor)
    # The rows of earlier images are counted in few steps, because each step waits for memory.
    earlier = min(power_of_two(max(images - 1, 1) * tokens), 16 if interpreted() else 8192) if few(images) else 2
    planner_triton.halt_kernel[(images,)](
        probe_BN,
        plan_BN,
        sum_BN,
        live_BN.view(torch.uint8),
        probe_BN if forced_BN is None else forced_BN,
        score,
        total,
        new.view(torch.uint8),
        counts,
        rows,
        starts,
        rule.gamma,
        rule.beta,
        float(rule.follow),
        rule.layer,
        0.0 if per_image else float(rule.threshold),
        rule.threshold if per_image else probe_BN,
        images,
        tokens,
        rule.prefix,
        FORCED=forced_BN is not None,
        PER_IMAGE=per_image,
        LIST=few(images),
        BN=power_of_two(tokens),
        BB=earlier,
        num_warps=min(max(earlier // 512, 4), 16),
        **overlapping(probe_BN, probe_BN.numel()),
    )
    if few(images):
        return score, total, new, Rows(rows, starts)
    dense_rows = new.view(torch.uint8)
    return score, total, new, listed(dense_rows, dense_rows, counts)[0]
