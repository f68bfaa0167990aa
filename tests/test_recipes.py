"""Every recipe of a paper builds, and takes two steps on made data."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from safetensors.torch import load_file

import dwindle
from dwindle.experiments.compare import Compare
from dwindle.experiments.search import ranges
from dwindle.recipes import build, data_set, find_comparison, find_recipe, papers, tables
from dwindle.train.loop import Run
from dwindle.train.recipe import Recipe, changed
from shared.classes import write_classes
from shared.scenes import write_scenes

# The same at a size that two steps on a CPU take a moment for: twelve blocks, as the papers' models have.
SMALL = ["model=vit_tiny_patch16_224", "image_size=32", "workers=0", "global_batch=4", "epochs=1", "warmup_epochs=0"]
PRESETS = ("high_accuracy", "balanced", "high_efficiency")
RECIPES = [
    *[(name, preset) for name in ("aht_printed", "aht_grounded") for preset in PRESETS],
    *[(name, None) for name in ("static_deit_small", "dynamicvit_deit_small", "avit_deit_small", "avit_deit_tiny")],
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_classes(tmp_path_factory.mktemp("data"), train=4, val=4)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> str:
    return str(write_scenes(tmp_path_factory.mktemp("scenes"), train=8, val=2))


def two_steps(recipe: Recipe, data: str, out) -> Run:
    run = Run(recipe, data, out, device="cpu")
    assert (run.task.batch, run.steps_per_epoch) == (4, 2)
    run.model.train()
    for x, y in run.task.batches(train=True):
        terms = run._step(x, y)
        assert terms["total"].isfinite()
    assert run.step == 2
    return run


@pytest.mark.parametrize(("name", "preset"), RECIPES)
def test_two_steps(name, preset, data, tmp_path):
    recipe = build(find_recipe(name), "imagenet", preset=preset)
    assert (recipe.global_batch, recipe.lr_batch, recipe.weight_decay) == (1024, 1024, 0.05)
    assert recipe.augment.startswith("rand") and not recipe.mixup
    small = dataclasses.replace(changed(recipe, SMALL), weights=None, teacher=None)  # a new head has nothing to teach
    run = two_steps(small, data, tmp_path / "run")
    assert run.optimizer.param_groups[0]["peak"] in (recipe.lr / 256, recipe.method_lr / 256)  # 4 images for 1,024


# AdaPerceiver's tables: batch, epochs or steps, rate, decay, averaging, warm-up, SOAP's first step and frequency.
PERCEIVER = {
    "ada_logits": (4096, 135, 1e-3, 0.003, (0.999, 0.999, 0.9998), 3000, 500, 100),
    "ada_features": (4096, 20, 5e-4, 0.003, 0.9995, 3000, 500, 30),
    "ada_imagenet": (1024, 70, 5e-4, 0.003, 0.9995, 500, 250, 30),
    "ada_segment": (16, 50_530, 5e-4, 0.1, 0.9995, 1500, 500, 30),
    "ada_depth": (16, 47_584, 1e-4, 0.1, 0.9995, 1500, None, None),
}
TINY = ["model=tiny", "method.patch=8", "image_size=32", "workers=0", "global_batch=4", "epochs=1"]


@pytest.mark.parametrize("name", PERCEIVER)
def test_a_table_of_adaperceiver_is_as_printed(name):
    recipe = build(find_recipe(name))
    soap = recipe.optimizer == "soap"
    assert PERCEIVER[name] == (
        *(recipe.global_batch, recipe.steps or recipe.epochs, recipe.lr, recipe.weight_decay),
        *(recipe.stage_ema or recipe.ema, recipe.warmup_steps),
        *((recipe.precondition_from, recipe.precondition_every) if soap else (None, None)),
    )
    assert recipe.clip == 3 and recipe.lr_batch == recipe.global_batch and recipe.model == "paper"
    if name == "ada_logits":
        assert recipe.ends(recipe.epochs) == [50, 115, 135] and recipe.lr * recipe.stage_lr[2] == 5e-4
    if recipe.steps:
        assert (recipe.schedule, recipe.poly_power, recipe.min_lr) == ("poly", 1.0, 1e-6)


@pytest.mark.parametrize("optimizer", ["as printed", "adamw"])
@pytest.mark.parametrize("name", PERCEIVER)
def test_two_steps_of_a_table_of_adaperceiver(name, optimizer, data, scenes, tmp_path):
    recipe = build(find_recipe(name))
    settings = [*TINY, *(["steps=2"] if recipe.steps else [])]
    if optimizer == "adamw":
        settings.append("optimizer=adamw")
    elif recipe.optimizer == "soap":
        pytest.importorskip("pytorch_optimizer", reason="the extra soap is not installed")
    if recipe.teacher:
        vit = timm.create_model("test_vit", num_classes=2, img_size=32)
        settings.append(f"teacher={dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path / 'teacher')}")
    if recipe.freeze_backbone or name == "ada_features":
        outputs = {} if name in ("ada_features", "ada_imagenet") else {"outputs": "dense", "head": "mlp"}
        begun = dwindle.AdaPerceiver.preset("tiny", **outputs)
        settings.append(f"weights={dwindle.save(begun, tmp_path / 'begun')}")
    run = two_steps(changed(recipe, settings), scenes if recipe.steps else data, tmp_path / "run")
    kind = "adamw" if optimizer == "adamw" else recipe.optimizer
    assert type(run.optimizer).__name__ == {"adamw": "AdamW", "nadamw": "NAdam", "soap": "StartedSOAP"}[kind]
    assert run.average.decay == (recipe.stage_ema or (recipe.ema,))[0]
    assert run.model.classes == {"ada_depth": 256, "ada_segment": 3, "ada_features": 64}.get(name, 2)
    assert run.model.outputs == ("class" if name in ("ada_logits", "ada_imagenet") else "dense")
    assert {p.requires_grad for p in run.model.blocks.parameters()} == {not recipe.freeze_backbone}


def test_the_conditions_are_those_printed():
    table_2 = zip(PRESETS, ((1e-3, 1.0), (5e-2, 0.5), (1e-2, 0.2)), (0.83, 0.67, 0.52))
    for preset, weights, budget in table_2:
        recipe = papers.aht_printed(preset)
        method = recipe.make_method()
        assert (method.lambda_p, method.lambda_t) == weights and method.stages == (3, 6, 9)
        assert (recipe.model, recipe.epochs, recipe.lr) == ("deit_small_patch16_224", 50, 1e-4)
        assert method.config == dwindle.AHT.as_printed(preset).config
        assert papers.aht_grounded(preset).make_method().budget == budget
    avit = papers.avit_deit_tiny()
    assert (avit.model, avit.epochs, avit.lr) == ("deit_tiny_patch16_224", 100, 1.5e-3)
    method = avit.make_method()
    assert (method.alpha_p, method.alpha_d, method.gamma.item(), method.beta.item()) == (5e-4, 0.1, 5.0, -10.0)
    assert papers.dynamicvit_deit_small().make_method().keep == pytest.approx(0.7)
    assert papers.aht_printed(data="cifar100").min_scale > papers.aht_printed(data="places365").min_scale


def test_the_method_comes_along_to_another_data_set(data, tmp_path):
    """Table 4: planners, gamma, beta and bar go on; the head is new."""
    small = [*SMALL, "method.stages=(3,6)"]
    first = changed(dataclasses.replace(papers.aht_grounded(), weights=None, teacher=None), small)
    run = two_steps(first, data, tmp_path / "first")
    with torch.no_grad():
        run.model.method.bar.fill_(0.25)
        run.model.method.gamma.fill_(1.5)
    dwindle.save(run.model, tmp_path / "first")
    other = tmp_path / "other"
    for split in ("train", "val"):  # another data set: three classes
        for i, name in enumerate("abc"):
            (other / split / name).mkdir(parents=True)
            for path in sorted((tmp_path / data / split).rglob("*.png"))[i::3]:
                (other / split / name / f"{path.parent.name}{path.name}").symlink_to(path)
    second = changed(papers.aht_grounded_transfer("balanced", "cifar100"), [*small, f"weights={tmp_path / 'first'}"])
    moved = Run(second, str(other), tmp_path / "second", device="cpu")
    assert moved.model.classes == 3 and moved.model.method.bar == 0.25 and moved.model.method.gamma == 1.5
    before = load_file(tmp_path / "first" / "model.safetensors")
    for name, value in moved.model.method.state_dict().items():
        assert torch.equal(value, before[f"method.{name}"]), name
    with pytest.raises(dwindle.DwindleError, match="holds AHT, but the recipe trains AViT"):
        Run(changed(dataclasses.replace(second, method_options={}), ["method=AViT"]), str(other), tmp_path / "x")
    with pytest.raises(dwindle.DwindleError, match="is no checkpoint whose method could go on"):
        Run(dataclasses.replace(second, weights=None), str(other), tmp_path / "x")


def test_a_batch_of_all_processes():
    recipe = Recipe(global_batch=64, lr_batch=256)
    assert [recipe.share(processes) for processes in (1, 2, 8)] == [64, 32, 8]
    assert {recipe.scaled(processes) for processes in (1, 2, 8)} == {0.25}
    plain = Recipe(batch=64)
    assert plain.share(2) == 64 and plain.scaled(2) == 1.0 and dataclasses.replace(plain, lr_batch=256).scaled(2) == 0.5
    with pytest.raises(dwindle.DwindleError, match="global_batch = 64: 3 processes must share it evenly"):
        recipe.share(3)


def test_arguments_of_a_recipe():
    assert [data_set(place) for place in ("imagenet", "x/CIFAR-100", "/d/places365_standard/", "photos")] == [
        *("imagenet", "cifar100", "places365", "imagenet"),
    ]
    assert build(find_recipe("aht_printed"), "x/cifar100", preset="high_efficiency") == papers.aht_printed(
        "high_efficiency", "cifar100"
    )
    with pytest.raises(dwindle.DwindleError, match="Unknown preset 'balance'"):
        build(find_recipe("aht_printed"), preset="balance")
    with pytest.raises(dwindle.DwindleError, match="--preset balanced: tiny_test has no preset"):
        build(find_recipe("tiny_test"), preset="balanced")


STEPPED: set[str] = set()  # what tables share is trained once
TABLES = ("aht_table2", "aht_table3", "aht_table4", "aht_table5", "avit_ablations")


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_of_a_table_takes_two_steps(name, data, tmp_path):
    plan = build(find_comparison(name), data)
    assert not any("," in entry for entry in plan.names())  # `--only` takes them apart there
    assert len({entry.name for entry in plan.compared}) == len(plan.compared)
    plan = dataclasses.replace(plan, base=changed(dataclasses.replace(plan.base, weights=None), SMALL))
    work = Compare(name, plan, data, tmp_path / "runs", tmp_path / "results", device="cpu")
    for job in plan.jobs(work):
        heads = None if job.recipe.heads is None else 2  # of the three there are here
        recipe = dataclasses.replace(job.recipe, teacher=None, heads=heads)
        if not recipe.keep_method and repr(recipe) not in STEPPED:
            two_steps(recipe, data, tmp_path / job.stem)
            STEPPED.add(repr(recipe))


def test_what_is_printed_is_not_turned_and_not_taught():
    table = tables.aht_table3()
    for entry in table.compared:
        for options in entry.by_cost.values():
            if "as printed" in entry.name:
                assert options["threshold"] == 1.0 and options["budget"] is None and entry.changes["teacher"] is None
            if "grounded" in entry.name:
                assert options["budget"] in (0.83, 0.67, 0.52) and entry.label.startswith("AHT, grounded")
    assert {"Resolution", "Random", "Shallow", "static again", "narrower"} <= set(table.names())


def test_table_4_begins_with_what_table_3_trained(tmp_path):
    for source in (tables.aht_table2(), tables.aht_table3()):
        work = Compare("x", source, "data", tmp_path, tmp_path / "results", device="cpu")
        trained = {job.stem for job in source.jobs(work)}
        for entry in tables.aht_table4("cifar100", str(tmp_path)).entries[:2]:
            assert entry.changes["weights"].removeprefix(f"{tmp_path}/") in trained and entry.changes["keep_method"]


def test_ranges_of_a_search():
    assert ranges(["method.gamma=0.5:8", "method.beta=-10:0"]) == {"method.gamma": (0.5, 8), "method.beta": (-10, 0)}
    with pytest.raises(dwindle.DwindleError, match=r"--space method\.gamma=1: expected a setting and its range"):
        ranges(["method.gamma=1"])
