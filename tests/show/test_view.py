import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.show import drawing, view
from dwindle.show import figures as charts


def traced(method, size=(32, 32), depths=None, images=2):
    """Trace of a small model; `depths` (images, patches) forces the patches, prefix tokens go to the end."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=size, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5)
    model = dwindle.adapt(vit, method).eval()
    if depths is not None:
        depths = torch.cat([torch.full((images, 1), 3), depths], 1)
    return model(torch.randn(images, 3, *size), depths=depths).trace  # with grad: figures must detach


def fake(grid, blocks, images=2, prefix=1, plans=None):
    """What the figures read of a Trace, for any grid and depth."""
    depth = torch.randint(1, blocks + 1, (images, prefix + grid[0] * grid[1]), generator=torch.manual_seed(0))
    live = torch.arange(1, blocks + 1)[:, None, None] <= depth
    return SimpleNamespace(
        depth=depth,
        live=live,
        counts=live.sum(-1),
        patches=depth[:, prefix:].unflatten(1, grid),
        plans=plans or {},
        prefix=prefix,
        grid=grid,
        blocks=blocks,
    )


def photo(height=32, width=32):
    return np.random.default_rng(0).integers(0, 200, (height, width, 3), dtype=np.uint8)


def titles(figure):
    return [axis.get_title() for axis in figure.axes]


@pytest.mark.parametrize("method, size", [("aht", (16, 40)), ("avit", (32, 32))])
def test_draw_writes_every_figure(tmp_path, method, size):
    trace = traced(dwindle.AHT(stages=(1,)) if method == "aht" else dwindle.AViT(target_depth=2), size)
    images = [photo(*size), Image.fromarray(photo(*size))]
    out = tmp_path / "deep" / "figures"
    paths = view.draw(images, trace, out, ["cat", "dog"])
    assert [path.name for path in paths] == ["cat.png", "cat_layers.png", "dog.png", "dog_layers.png", "summary.png"]
    assert sorted(out.iterdir()) == sorted(paths)  # no drafts left behind
    for path in paths:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG" and 400 < image.width < 2500 and 200 < image.height < 1500
            assert len(np.unique(np.asarray(image.convert("L")))) > 10
    assert any(title.startswith("planned") for title in titles(view.picture(images[0], trace, 0))) == (method == "aht")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, float])
def test_veil_covers_exactly_the_halted_patches(dtype):
    raw = photo(16, 40)
    image = raw if dtype is np.uint8 else raw.astype(dtype) * 257 if dtype is np.uint16 else raw / 255
    depths = torch.tensor([[3, 1, 2, 3, 3], [2, 3, 3, 1, 3]])
    trace = traced(dwindle.AHT(stages=(1,)), (16, 40), depths.reshape(1, -1), images=1)
    assert torch.equal(trace.patches[0], depths)
    plain = raw / 255
    shown = drawing.veil(image, trace.patches[0].numpy(), trace.blocks)
    assert shown.shape == (16, 40, 3) and shown.min() >= 0 and shown.max() <= 1
    share = ((shown - plain) / (drawing.VEIL - plain)).reshape(2, 8, 5, 8, 3).transpose(0, 2, 1, 3, 4)
    expected = {3: 0.0, 2: (drawing.FAINTEST + drawing.STRONGEST) / 2, 1: drawing.STRONGEST}
    for patch, depth in zip(share.reshape(10, -1), depths.flatten().tolist()):
        np.testing.assert_allclose(patch, expected[depth], atol=1e-9)


def test_picture_shows_the_veil_the_depths_and_their_share():
    trace, image = fake((3, 4), 6), photo(24, 32)
    figure = view.picture(image, trace, 1, title="50 $\nfor a $ cat")
    plain, veiled, depths, exits = figure.axes[:4]
    np.testing.assert_allclose(plain.images[0].get_array(), image / 255)
    np.testing.assert_allclose(veiled.images[0].get_array(), drawing.veil(image, trace.patches[1].numpy(), 6))
    assert depths.images[0].get_extent() == [0, 32, 24, 0] and depths.child_axes[0].get_ylabel() == "blocks run"
    assert depths.child_axes[0].get_ylim() == (1, 6)
    assert [bar.get_height() for bar in exits.patches] == [(trace.depth[1] == block).sum() for block in range(1, 7)]
    assert list(exits.get_xticks()) == [1, 2, 3, 4, 5, 6]
    assert exits.get_title() == f"{trace.depth[1].float().mean() / 6:.0%} of token-blocks computed"
    assert figure.get_suptitle() == "50 $\nfor a $ cat"


def test_plan_is_the_last_one_made_and_grey_where_none_was():
    nan = torch.nan
    plans = {
        2: torch.tensor([[4.0, 1.5, 3.0, nan, 2.0]]),
        1: torch.tensor([[9.0, 9.0, 9.0, nan, 2.5]]),
        3: torch.tensor([[4.0, nan, 3.5, nan, nan]]),
    }
    trace = fake((2, 2), 4, images=1, plans={stage: plan.requires_grad_().bfloat16() for stage, plan in plans.items()})
    np.testing.assert_array_equal(view._plan(trace, 0), [[1.5, 3.5], [np.nan, 2.0]])
    axis = view.picture(photo(), trace, 0).axes[3]
    assert axis.get_title() == "planned: mean depth 2.3\ngrey: halted before a plan"
    assert tuple(axis.images[0].get_array()[1, 0]) == pytest.approx((0.85, 0.85, 0.85, 1))


def test_walk_veils_the_dead_of_each_block():
    trace, image = fake((3, 4), 5, prefix=2), photo(24, 32)
    figure = view.walk(image, trace, 0)
    assert titles(figure) == [f"block {block}: {count} of 14" for block, count in enumerate(trace.counts[:, 0], 1)]
    for axis, live in zip(figure.axes, trace.live[:, 0, 2:]):
        changed = (axis.images[0].get_array() != image / 255).any(-1).reshape(3, 8, 4, 8).any((1, 3))
        np.testing.assert_array_equal(changed.ravel(), ~live.numpy())


def test_summary_names_few_images_and_counts_many():
    trace = fake((3, 4), 5, images=20)
    names = [*(f"image {index}" for index in range(19)), "IMG_20240101_a_long_one_0019"]
    stops, share, means = view.summary(trace, names).axes
    assert sum(bar.get_height() for bar in stops.patches) == 20 * 13
    live = 100 * trace.counts.float().mean(1) / 13
    np.testing.assert_allclose(share.lines[0].get_ydata(), live, rtol=1e-5)
    assert [label.get_text() for label in means.get_yticklabels()] == [*names[:-1], "IMG_2024010…ong_one_0019"]
    means = view.summary(fake((3, 4), 5, images=50)).axes[2]
    assert means.get_ylabel() == "images" and sum(bar.get_height() for bar in means.patches) == 50


@pytest.mark.parametrize("grid, blocks", [((1, 1), 1), ((2, 9), 13)])
def test_any_grid_and_any_number_of_blocks(tmp_path, grid, blocks):
    trace = fake(grid, blocks, images=1)
    assert len(view.draw([photo(8 * grid[0], 8 * grid[1])], trace, tmp_path, ["x"])) == 3
    figure = charts.depth_map(trace.patches[0].float().numpy(), blocks, 1)
    drawing.save_figure(figure, tmp_path / "average.png")


def test_names_are_safe_and_unique():
    names = ["a b/ç.jpg", "../../etc", "cat", "Cat", "cat_layers", "summary", "", "猫", "x" * 300]
    stems = drawing.file_stems(names)
    assert stems[:6] == ["a_b_.jpg", "etc", "cat", "Cat-2", "cat_layers-2", "summary-2"]
    assert stems[6:] == ["image", "image-2", "x" * 100]
    assert drawing.file_stems(["a_layers", "a"]) == ["a_layers", "a-2"]


def test_mistakes_are_named(tmp_path):
    trace, images = fake((2, 2), 3), [photo(), photo()]
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        with pytest.raises(dwindle.DwindleError, match="there is a file of that name"):
            view.draw(images, trace, out, ["a", "b"])
    assert taken.read_text() == "mine"
    with pytest.raises(dwindle.DwindleError, match="trace is of 2 images"):
        view.draw(images, trace, tmp_path / "out", ["a"])
    with pytest.raises(dwindle.DwindleError, match="no image"):
        drawing.veil(np.zeros((3, 32, 32)), np.ones((2, 2)), 3)


def test_failed_save_leaves_the_old_picture(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("old")

    def savefig(draft, format):
        draft.write_text("half")
        raise OSError("disk full")

    with pytest.raises(dwindle.DwindleError, match="disk full"):
        drawing.save_figure(SimpleNamespace(savefig=savefig), path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"] and path.read_text() == "old"


def test_import_is_lean_and_figures_need_no_pyplot():
    code = (
        "import sys; from dwindle.show import drawing, view; assert 'matplotlib' not in sys.modules, 'import';"
        "drawing.canvas(1, 1).savefig('/dev/null', format='png');"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
