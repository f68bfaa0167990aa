"""One function per experiment. Its docstring is the exact command, the hardware and the number to expect.

DATA stands for a folder with the data sets and DeiT's weights, as docs/data.md lays them out.
"""

import dataclasses
from typing import Any

from ..models.adaperceiver.compare import AdaComparison
from ..models.adaperceiver.recipe import AdaRecipe
from ..models.vit.compare import GROUNDED, Comparison, Entry
from ..train.recipe import Recipe
from .papers import grounded_at


def aht_deit_tiny_imagenet() -> Recipe:
    """The checkpoint that ships: DeiT-T made adaptive with 1,000 unlabelled ImageNet images and itself as teacher.

    dwindle train aht_deit_tiny_imagenet --data DATA/imagenet_samples --eval-data DATA/imagenet_val \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors --out runs/aht_deit_tiny_imagenet
    """
    return Recipe(
        model="deit_tiny_patch16_224",
        method="AHT",
        method_options=grounded_at(0.67, hidden=192),
        epochs=1000,
        batch=200,
        lr=5e-5,
        teacher="static",
        label_weight=0.0,
        **_mixed(min_scale=0.25, jitter=0.3, mixup=0.8, mix_prob=0.8),
        eval_every=1000,
        save_every=100,
    )


def aht_cifar100() -> Recipe:
    """AHT-ViT on DeiT-T, CIFAR-100 at 224 pixels, with the paper's optimiser.

    dwindle train aht_cifar100 --data DATA/cifar100 --out runs/aht_cifar100 \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors
    """
    return Recipe(model="deit_tiny_patch16_224", method_options={"budget": 0.67}, min_scale=0.5)


def avit_cifar100() -> Recipe:
    """A-ViT under the same conditions.

    dwindle train avit_cifar100 --data DATA/cifar100 --out runs/avit_cifar100 \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors
    """
    return Recipe(model="deit_tiny_patch16_224", method="AViT", min_scale=0.5)


def static_cifar100() -> Recipe:
    """The backbone alone under the same conditions, as the reference for the others.

    dwindle train static_cifar100 --data DATA/cifar100 --out runs/static_cifar100 \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors
    """
    return Recipe(model="deit_tiny_patch16_224", method="Static", min_scale=0.5)


def aht_deit_small() -> Recipe:
    """The paper's own setting: DeiT-S on ImageNet-1K, 50 epochs (not run by us: it needs the whole data set).

    dwindle train aht_deit_small --data imagenet --out runs/aht_deit_small
    """
    return Recipe()


def aht_deit_tiny_cifar100() -> Recipe:
    """AHT-ViT on a DeiT-T that was trained on CIFAR-100 (its folder: STATIC), which is its teacher too.

    dwindle train aht_deit_tiny_cifar100 --data DATA/cifar100 --out runs/aht_deit_tiny_cifar100 \\
        --set weights=STATIC --set teacher=STATIC
    """
    return dataclasses.replace(_cifar100(), method_options=grounded_at(0.67), lr=1e-4)


def ada_cifar100() -> Recipe:
    """AdaPerceiver on CIFAR-100, begun from the blocks of a DeiT-T trained there (a shipped one, nothing halted: 85.4)
    and distilled from it.

    dwindle train ada_cifar100 --data DATA/cifar100 --out runs/ada_cifar100

    One H200, bf16, 4.0 s an epoch: 85.73 at 96 tokens, 12 blocks, width 192 (docs/adaperceiver.md).
    """
    return _ada_cifar100()


def ada_cifar100_cpu() -> Recipe:
    """`ada_cifar100` with as many epochs as two cores that multiply in bf16 train in an hour and a half.

    dwindle train ada_cifar100_cpu --data DATA/cifar100 --out runs/ada_cifar100_cpu --set compile=true

    2 cores of an AMD EPYC (Zen 5), 88 minutes: 82.84 at 96 tokens, 12 blocks, width 192. With --set
    weights=runs/ada_cifar100_cpu --set epochs=12 --set views=4 and two more hours: 83.52. With one read-out corrected
    it ships as `ada_small_cifar100` (docs/adaperceiver.md).
    """
    return _ada_cifar100_cpu(7)


def _ada_cifar100_cpu(epochs: int) -> AdaRecipe:
    return dataclasses.replace(
        _ada_cifar100(), epochs=epochs, batch=128, lr=4e-4, warmup_epochs=0.5, ema=0.998, cpu_amp=True
    )


def _ada_cifar100() -> AdaRecipe:
    return dataclasses.replace(
        _ada(144),
        method_options={"tokens": (32, 64, 96), "readouts": "own", "mask": "open"},
        mask_steps=0.4,
        # All axes vary from the first epoch on, so that every setting is trained for the whole schedule.
        stages=(0.0, 0.0, 1.0),
        largest_weight=0.5,
        full_width=0.4,
    )


def _ada(epochs: int) -> AdaRecipe:
    return AdaRecipe(
        weights="aht_deit_tiny_cifar100",
        teacher="aht_deit_tiny_cifar100",
        epochs=epochs,
        batch=256,
        lr=5e-4,
        block_lr=0.4,
        warmup_epochs=1.0,
        clip=3.0,
        ema=0.999,
        restart=False,
        depth_weight=2.0,
        # A small data set gains most from mixed images, and from a teacher's answers on them.
        label_weight=0.2,
        teacher_weight=0.8,
        smoothing=0.0,
        **_mixed(min_scale=0.4, jitter=0.2, mixup=0.2, mix_prob=0.8),
        resident=True,
        eval_every=24,
        save_every=8,
    )


def ada_static_cifar100() -> Recipe:
    """The same network at one setting only, as the reference for `ada_cifar100`. --set makes it smaller, as here to 32
    tokens, 6 blocks, width 96 (half the neurons of an FFN):

    dwindle train ada_static_cifar100 --data DATA/cifar100 --out runs/ada_32_6_96 --set "method.tokens=(32,)" \\
        --set method.depth=6 --set method.ffn_ratio=2.0

    One H200, bf16: 68.69; 64 tokens, 9 blocks, width 144: 81.29; 96, 12, 192: 85.54. It has a third of the epochs, so
    that the three sizes together see as many images as `ada_cifar100`.
    """
    fixed = {"tokens": (96,), "widths": (192,)}
    return dataclasses.replace(_ada(48), method_options=fixed, stages=(1.0, 0.0, 0.0))


def ada_cifar100_compare() -> AdaComparison:
    """`ada_cifar100` at every setting and under every policy, and beside it `ada_static_cifar100` at three sizes.

    dwindle compare ada_cifar100_compare --data DATA/cifar100 --out runs/ada_cifar100_compare

    docs/adaperceiver.md has its results on one H200, where the adaptive network takes 11 minutes.
    """
    return _ada_comparison(_ada_cifar100())


def ada_cifar100_cpu_compare() -> AdaComparison:
    """`ada_cifar100_compare` for two cores that multiply in bf16: 21 epochs, and 7 for each network of one setting.

    dwindle compare ada_cifar100_cpu_compare --data DATA/cifar100 --out runs/ada_cpu_compare

    The networks of one setting on 2 cores of an AMD EPYC: 52.86, 75.10 and 83.25 (docs/adaperceiver.md).
    """
    return _ada_comparison(dataclasses.replace(_ada_cifar100_cpu(21), views=4, compile=True))


def _ada_comparison(base: AdaRecipe) -> AdaComparison:
    return AdaComparison(
        base=base,
        sizes=((32, 6, 96), (64, 9, 144), (96, 12, 192)),
        between=(16, 24, 48, 80, 112, 128, 192, 256),
    )


def ada_tiny_test() -> Recipe:
    """A few seconds on a CPU, on any folder of images: does AdaPerceiver train here?

    dwindle train ada_tiny_test --data FOLDER --out runs/ada-tiny
    """
    return _ada_tiny()


def _ada_tiny() -> AdaRecipe:
    return AdaRecipe(model="tiny", epochs=3, batch=8, workers=0, warmup_epochs=0.0, lr=1e-3, stages=(1, 1, 1))


def ada_tiny_compare() -> AdaComparison:
    """A minute on a CPU, on any folder of images: does comparing AdaPerceivers run here?

    dwindle compare ada_tiny_compare --data FOLDER --out runs/ada-tiny-compare
    """
    return AdaComparison(
        base=_ada_tiny(),
        sizes=((4, 2, 16), (16, 4, 32)),
        between=(6,),
        thresholds=(0.5,),
        prices=(0.05,),
        batch=8,
    )


def tiny_test() -> Recipe:
    """A few seconds on a CPU, on any folder of images: does everything run here?

    dwindle train tiny_test --data FOLDER --out runs/tiny
    """
    return Recipe(
        model="vit_tiny_patch16_224",
        weights=None,
        image_size=32,
        epochs=2,
        batch=8,
        workers=0,
        method_options={"budget": 0.7},
        warmup_epochs=0.0,
    )


def _mixed(min_scale: float, jitter: float, mixup: float, mix_prob: float) -> dict[str, Any]:
    """Settings of the training images: mixed by mixup or CutMix, without RandAugment and erasing."""
    settings: dict[str, Any] = {"min_scale": min_scale, "jitter": jitter, "mixup": mixup, "mix_prob": mix_prob}
    return {**settings, "cutmix": 1.0, "augment": None, "erase": 0.0}


_MERGING = {"merge": "nearest", "lambda_attention": 0.2}  # what the grounded AHT has beside its planners


def _cifar100() -> Recipe:
    """The conditions every method on CIFAR-100 shares."""
    return Recipe(
        model="deit_tiny_patch16_224",
        epochs=20,
        batch=512,
        lr=3e-4,
        **_mixed(min_scale=0.4, jitter=0.2, mixup=0.2, mix_prob=0.5),
        label_weight=0.5,
        teacher_weight=0.5,
        resident=True,
        eval_every=20,
        save_every=5,
    )


def cifar100_deit_tiny() -> Comparison:
    """Table 4's row with every method: DeiT-T, CIFAR-100 at 224. Static: 20 epochs from the ImageNet weights. Every
    method: 20 epochs from that model's weights, with it as teacher. "static again" is the static model trained under
    the same conditions, the reference for the others.

    dwindle compare cifar100_deit_tiny --data DATA/cifar100 --out runs/cifar100 \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors
    """
    seeds, costs = (0, 1, 2), (0.83, 0.67, 0.52)
    depths = {0.83: {"depth": 10}, 0.67: {"depth": 8}, 0.52: {"depth": 6}}
    targets = {0.83: {"target_depth": 10.0}, 0.67: {"target_depth": 8.0}, 0.52: {"target_depth": 6.0}}
    return Comparison(
        base=_cifar100(),
        adapted=True,
        reference="static again",
        changes={"lr": 1e-4},
        static_seeds=seeds,
        entries=(
            Entry("static again", "Static", by_cost={1.0: {}}, costs=(1.0,), seeds=seeds),
            Entry("AHT", "AHT", by_cost={cost: grounded_at(cost) for cost in costs}, seeds=seeds, label=GROUNDED),
            Entry("TopK", "TopK", seeds=seeds),
            Entry("TopK fused", "TopK", {"fuse": True}),
            Entry("DynamicViT", "DynamicViT"),
            Entry("A-ViT", "AViT", by_cost=targets),
            Entry("ToMe", "ToMe", train="never"),
            Entry("Shallow", "Shallow", by_cost=depths),
            # DeiT-T with two of its three heads, and so with two thirds of all channels.
            Entry("narrower", "Static", by_cost={0.46: {}}, costs=(0.46,), changes={"heads": 2}),
            Entry("TopK merging + attention", "TopK", _MERGING),
            Entry("DynamicViT merging + attention", "DynamicViT", _MERGING),
            Entry("A-ViT merging + attention", "AViT", _MERGING, targets),
            Entry("Random merging", "Random", {"merge": "nearest"}),
            Entry("ACT", "ACT", train="once"),
            Entry("ACT at the budget", "ACT"),
            Entry("PonderNet", "PonderNet", train="once"),
            # At beta_kl = 1 the optimal p is the prior times exp(-loss), so that every depth is trained.
            Entry("PonderNet beta_kl = 1", "PonderNet", {"beta_kl": 1.0}, train="once"),
            Entry("Confidence", "Confidence", train="once"),
            Entry("Similarity", "Similarity", train="once"),
            # Table 5, and the ablations that the paper's conclusion calls for.
            _ablation("lambda_t = 0", lambda_t=0.0),
            _ablation("lambda_t = 0.5", lambda_t=0.5),
            _ablation("T = 1", threshold=1.0),
            _ablation("sigma = 0.5", (0.83, 0.67), seeds, sigma=0.5),
            _ablation("sigma = 2", sigma=2.0),
            _ablation("stages 3-6-9", stages=(3, 6, 9)),
            _ablation("stages 2-4-6-8-10", stages=(2, 4, 6, 8, 10)),
            _ablation("class token may halt", halt_class=True),
            _ablation("no merging", merge="none"),
            _ablation("one rest token", merge="rest"),
            _ablation("no importance", lambda_i=0.0),
            _ablation("no straight-through", straight_through=False),
        ),
    )


def _ablation(
    name: str, costs: tuple[float, ...] = (0.67,), seeds: tuple[int, ...] | None = None, **options: Any
) -> Entry:
    by_cost = {cost: grounded_at(cost, **options) for cost in costs}
    return Entry(name, "AHT", by_cost=by_cost, costs=costs, seeds=seeds, group="ablation")


def imagenet_deit_tiny() -> Comparison:
    """DeiT-T as published, made adaptive with 1,000 unlabelled ImageNet images and itself as teacher; beside it methods
    that need no training.

    dwindle compare imagenet_deit_tiny --data DATA/imagenet_samples --eval-data DATA/imagenet_val --out runs/imagenet \\
        --set weights=DATA/deit_tiny_patch16_224/model.safetensors
    """
    costs = (0.83, 0.67, 0.52)
    return Comparison(
        base=dataclasses.replace(aht_deit_tiny_imagenet(), method_options={}, resident=True),
        pretrained_static=True,
        entries=(
            Entry("AHT", "AHT", by_cost={cost: grounded_at(cost, hidden=192) for cost in costs}, label=GROUNDED),
            Entry("TopK", "TopK"),
            Entry("DynamicViT", "DynamicViT"),
            Entry("A-ViT", "AViT", by_cost={cost: {"target_depth": 12 * cost} for cost in costs}),
            Entry("ToMe (no training)", "ToMe", train="never"),
            Entry("TopK (no training)", "TopK", train="never"),
            Entry("TopK fused (no training)", "TopK", {"fuse": True}, train="never"),
        ),
    )


def tiny_compare() -> Comparison:
    """A minute on a CPU, on any folder of images: does comparing run here?

    dwindle compare tiny_compare --data FOLDER --out runs/tiny-compare
    """
    return Comparison(
        base=dataclasses.replace(tiny_test(), eval_every=2),
        costs=(0.7,),
        adapted=True,
        entries=(
            Entry("AHT", "AHT", {"stages": (2, 4)}, label=GROUNDED),
            Entry("Random", "Random", {"stages": (2, 4)}),
            Entry("ToMe", "ToMe", train="never"),
        ),
    )
