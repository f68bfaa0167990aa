"""Merging against plain loops; the layouts agree with each other, whichever row joins which."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dwindle.core.masked import Masked
from dwindle.core.packed import Packed
from dwindle.core.tokens import Probed
from dwindle.ops.merging import Merge, merge_ref, nearest_ref
from dwindle.runtime.padded import Padded


@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_merge_is_a_weighted_mean_of_all_who_joined(seed, images, count):
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(images, count, 3, generator=draw).double(), torch.rand(images, count, generator=draw) + 0.1
    weight = weight.double()
    goes = torch.randint(0, 2, (images, count), generator=draw).bool()
    goes[:, 0] = True
    into = torch.arange(count).expand(images, count).clone()
    for b in range(images):
        stays = goes[b].nonzero()[:, 0]
        for i in (~goes[b]).nonzero()[:, 0]:
            into[b, i] = stays[torch.randint(0, len(stays), (), generator=draw)]
    mean, total = merge_ref(x, weight, into)
    for b in range(images):
        for j in range(count):
            members = [i for i in range(count) if i == j or int(into[b, i]) == j]
            wanted = sum(weight[b, i] * x[b, i] for i in members) / sum(weight[b, i] for i in members)
            torch.testing.assert_close(mean[b, j], wanted)
            torch.testing.assert_close(total[b, j], sum(weight[b, i] for i in members))
            assert len(members) > 1 or torch.equal(mean[b, j], x[b, j])  # to the last bit


def test_the_nearest_is_the_most_alike_that_stays():
    keys = torch.tensor([[[1.0, 0.0], [9.0, 1.0], [0.0, 2.0], [1.0, 8.0]], [[1.0, 0.0]] * 4])
    staying = torch.tensor([[True, False, True, False], [False] * 4])
    leaving = torch.tensor([[False, True, False, True], [True] * 4])
    assert nearest_ref(keys, staying, leaving).tolist() == [[0, 0, 2, 2], [0, 1, 2, 3]]


@given(st.integers(0, 99), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_layouts_merge_alike(seed, by_size, nearest, moved):
    """Two steps: the second merges rows that have been merged, and after some are gone."""
    draw = torch.Generator().manual_seed(seed)
    images, count, prefix = 3, 9, 1
    x = torch.randn(images, count, 4, generator=draw, dtype=torch.float64)
    packed, masked = Packed.start(x, prefix), Masked.start(x, prefix)
    padded = Padded.start(x, prefix, moves=None if moved else (), prefix_stays=bool(seed % 2))
    for _ in range(2):
        keep = torch.rand(images, count, generator=draw) < 0.6
        keep[:, : prefix + 1] = True
        keep[0] = True  # an image that no token leaves
        keep[1, prefix:] &= not nearest  # one in which no patch stays
        live = masked.live
        keys = torch.randn(images, count, 2, generator=draw, dtype=torch.float64)
        weight = None if by_size else torch.rand(images, count, generator=draw, dtype=torch.float64)
        into = None if nearest else torch.where(live & ~keep, prefix, torch.arange(count))
        layouts = []
        for tokens in (packed, masked, padded):
            how = Merge(*(None if rows is None else tokens.gather(rows) for rows in (into, weight)))
            tokens = tokens.changed(probed=Probed(keys=torch.stack([tokens.gather(k) for k in keys.unbind(-1)], -1)))
            layouts.append(tokens.advance(tokens.gather(keep), merge=how))
        packed, masked, padded = layouts
        for tokens in (packed, padded):
            torch.testing.assert_close(tokens.stream()[masked.live], masked.x[masked.live])
            mine, size = tokens.where.dense_rows(tokens.size), masked.size
            torch.testing.assert_close(mine[masked.live], size[masked.live])
        if by_size:
            sizes = masked.image_sum(masked.size).long().tolist()
            assert sizes == [count, prefix if nearest else count, count]
