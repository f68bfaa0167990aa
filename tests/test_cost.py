"""MACs: the papers' figures, and torch's own counter on what was really executed."""

from __future__ import annotations

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dwindle
from dwindle.backbones import backbone_of
from dwindle.core.cost import static_macs
from dwindle.evaluate.bench import forced_depths
from shared.tiny import BACKBONES, METHODS, build, cover, images_for


def counted(call) -> float:
    """MACs by torch's counter, which sees attention only as plain products."""
    mode = FlopCounterMode(display=False)
    with mode as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("name", "gmacs"),
    [("deit_tiny_patch16_224", 1.26), ("deit_small_patch16_224", 4.6), ("deit_base_patch16_224", 17.6)],
)
def test_the_papers_figures(name, gmacs):
    with torch.device("meta"):
        vit = timm.create_model(name)
    assert static_macs(backbone_of(vit).shape) / 1e9 == pytest.approx(gmacs, rel=0.01)


@pytest.mark.parametrize("backbone, method", cover(turn=4, kinds_each=2))
def test_what_was_executed(backbone, method):
    model = build(backbone, METHODS[method]()).requires_grad_(False)
    images = images_for(model, 3)
    out = model(images)
    # torch does not count gamma * f, which is no matrix product; a tiny model shows it, a real one does not.
    scalar = float(out.trace.counts.sum()) if method.startswith(("AHT", "AViT")) else 0.0
    ours, theirs = float(model.macs(out.trace).sum()) - scalar, counted(lambda: model(images))
    if getattr(model.method, "merge", "none") == "nearest":
        # Counted as if every token were compared with every other; a pack compares those who leave with those who stay.
        pairs = sum((out.trace.counts[d] ** 2).sum() for d in range(4) if model.method.probe(d).merging)
        ours -= max(0.0, min(ours - theirs, float(pairs) * model.backbone.shape.head_size))
    if (
        method == "Resolution" and model.has_own_outputs
    ):  # its own code embeds the whole image before the smaller one is asked for
        shape = model.backbone.shape
        theirs -= 3 * (shape.tokens() - shape.prefix) * shape.token_macs
    assert ours == pytest.approx(theirs, rel=0.01)
    expected = counted(lambda: model.vit(images)) / 3
    assert model.static_macs() == pytest.approx(expected, rel=0.01)


def test_deit_small_packed_within_one_percent():
    model = dwindle.adapt(timm.create_model("deit_small_patch16_224"), dwindle.AHT()).eval()
    images = torch.randn(2, 3, 224, 224)
    depths = forced_depths(2, model.backbone.shape, 0.52)
    with torch.no_grad():
        out = model(images, depths=depths)
    assert float(model.macs(out.trace).sum()) == pytest.approx(counted(lambda: model(images, depths=depths)), rel=0.01)
    assert float(model.macs(out.trace).mean()) / model.static_macs() == pytest.approx(0.52, abs=0.02)


def test_forced_depths_have_exactly_the_share():
    shape = backbone_of(BACKBONES["registers"]()).shape
    for fraction in (1.0, 0.83, 0.52):
        depths = forced_depths(6, shape, fraction)
        assert depths.shape == (6, shape.tokens()) and depths.min() >= 1 and depths.max() <= shape.blocks
        assert (depths[:, : shape.prefix] == shape.blocks).all()
        assert float(depths.sum()) == round(fraction * depths.numel() * shape.blocks)
    lengths = (forced_depths(6, shape, 0.52) > 2).sum(1)
    assert len(lengths.unique()) > 1
    for wrong in (0.0, 0.01, 1.5):  # 0.01: less than what the first block and the prefix take
        with pytest.raises(dwindle.DwindleError, match="fraction"):
            forced_depths(1, shape, wrong)
