"""Weights that change behind a model's back: it answers by those it has now, and a prepared copy by those it had."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import dwindle
from shared.tally import SLOW
from shared.tiny import METHODS, build, images_for

BACKBONES = ("vit", "hf_dinov2") if SLOW else ("vit",)  # of each family; the second scales its layers
USUAL = ("AdamW", "LBFGS", "SGD")  # the optimisers that are tried by default

pytestmark = pytest.mark.graphs


def linears(model):
    return [layer for block in model.backbone.blocks for layer in block.modules() if isinstance(layer, nn.Linear)]


def same(a, b) -> bool:
    return torch.equal(a.trace.depth, b.trace.depth) and torch.allclose(a.logits, b.logits, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def holds(model, fast, before, images, tally, what: str) -> None:
    """After a change: packed, masked and a copy made now say the same; who was prepared before says what it said."""
    model.eval()
    now, masked = model(images), model(images, layout="masked")
    tally(same(now, masked), f"{what}: packed is not masked")
    tally(torch.equal(fast(images).logits, before.logits), f"{what}: reached a prepared copy")
    try:
        again = model.prepare()
    except dwindle.DwindleError:
        return  # refused, in a sentence
    tally(same(again(images), now), f"{what}: prepared anew it answers otherwise")


def optimisers():
    """Every optimiser of torch, each way it can be told to run."""
    for name, kind in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        if not SLOW and name not in USUAL:
            continue
        given = inspect.signature(kind).parameters
        for way in ("plain", "foreach", "fused"):
            if way == "plain" or way in given:
                yield name, kind, {} if way == "plain" else {way: True}


@pytest.mark.parametrize("backbone", BACKBONES[:1])
def test_optimisers(backbone, tally):
    labels = torch.arange(3)
    for name, kind, options in optimisers():
        model = build(backbone, METHODS["AHT"]())
        images = images_for(model, 3)
        with torch.no_grad():
            fast = model.prepare()
            before = fast(images)
        parameters = [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else list(model.parameters())

        def loss(model=model, images=images):
            out = model.train()(images)
            total = model.loss(out, labels)["total"]
            total.backward()
            return total

        try:
            optimiser = kind(parameters, **({"lr": 1e-2} | options))
            for _ in range(2):
                optimiser.zero_grad()
                optimiser.step(loss) if name == "LBFGS" else (loss(), optimiser.step())
        except (
            RuntimeError,
            ValueError,
            TypeError,
        ):  # this optimiser does not run so here (SparseAdam, no fused on a CPU)
            continue
        if not all(p.isfinite().all() for p in model.parameters()):
            continue  # it diverged
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), fast._model.parameters()))
        tally(moved, f"{name} {options} moved nothing")
        holds(model, fast, before, images, tally, f"{backbone} {name} {options}")


def _other_storage(weight):
    view = torch.empty(0)
    view.set_(weight.untyped_storage(), 0, weight.shape)
    view.mul_(1.3)


def _untyped(weight):
    weight.untyped_storage().copy_((weight.detach() * 0.7).clone().untyped_storage())


WRITES = {
    "data.mul_": lambda layer: layer.weight.data.mul_(1.5),
    "data.copy_": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)),
    "data =": lambda layer: setattr(layer.weight, "data", layer.weight.data * 1.2),
    "numpy": lambda layer: layer.weight.detach().numpy().__imul__(0.5),
    "storage": lambda layer: _other_storage(layer.weight),
    "untyped storage": lambda layer: _untyped(layer.weight),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()).mul_(1.1),
    "bias.data": lambda layer: layer.bias.data.add_(torch.linspace(-0.3, 0.3, len(layer.bias))),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 1.4)),
    "swap_tensors": lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() * 1.4)),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(layer.parameters()) * 1.1, layer.parameters()
    ),
    "load_state_dict": lambda layer: layer.load_state_dict({n: v * 1.2 for n, v in layer.state_dict().items()}),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(
        {n: v * 1.2 for n, v in layer.state_dict().items()}, assign=True
    ),
    "there and back": lambda layer: layer.double().float().weight.data.mul_(1.2),
}


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_writes(backbone, tally):
    for what, write in WRITES.items():
        for at in (0, -1) if SLOW else (0,):
            model = build(backbone, METHODS["AHT_merge"]())
            images, fast = images_for(model, 3), model.prepare()
            before = fast(images)
            model(images)
            write(linears(model)[at])
            tally(not torch.allclose(model(images).logits, before.logits), f"{what} at {at} changed nothing")
            holds(model, fast, before, images, tally, f"{backbone} {what} at {at}")


class LoRA(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def _lora(block, layer):
    for owner in list(block.modules()):
        for name, child in list(owner.named_children()):
            if child is layer:
                setattr(owner, name, LoRA(layer))


def _replaced(block, layer):
    forward = layer.forward
    layer.forward = lambda x: 1.5 * forward(x)


def _pruned(block, layer):
    from torch.nn.utils import prune

    prune.random_unstructured(layer, "weight", amount=0.5)


def _spectral(block, layer):
    nn.utils.parametrizations.spectral_norm(layer)


def _normed(block, layer):
    nn.utils.parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.data.mul_(1.5)


def _computed(block, layer):
    class Half(nn.Module):
        def forward(self, weight):
            return 0.5 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight", Half())


ADDED = {
    "forward hook": lambda block, layer: layer.register_forward_hook(lambda m, a, out: 1.5 * out),
    "forward pre-hook": lambda block, layer: layer.register_forward_pre_hook(lambda m, a: (0.5 * a[0],)),
    "hook with keywords": lambda block, layer: layer.register_forward_hook(
        lambda m, a, k, out: 0.8 * out, with_kwargs=True
    ),
    "block's hook": lambda block, layer: block.register_forward_hook(
        lambda m, a, out: (1.1 * out[0], *out[1:]) if isinstance(out, tuple) else 1.1 * out
    ),
    "norm's hook": lambda block, layer: next(
        m for m in block.modules() if isinstance(m, nn.LayerNorm)
    ).register_forward_hook(lambda m, a, out: 1.2 * out),
    "replaced forward": _replaced,
    "LoRA": _lora,
    "pruned": _pruned,
    "spectral norm": _spectral,
    "weight norm": _normed,
    "parametrized": _computed,
}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_what_is_added_to_layers(backbone, tally):
    for what, add in ADDED.items():
        for at in (0, -1) if SLOW else (0,):
            torch.manual_seed(0)
            model = build(backbone, METHODS["AHT"]())
            images, fast = images_for(model, 3), model.prepare()
            before = fast(images)
            block = model.backbone.blocks[1]
            layers = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
            add(block, layers[at])
            model.eval()
            with torch.no_grad():
                tally(not torch.allclose(model(images).logits, before.logits), f"{what} at {at} changed nothing")
            holds(model, fast, before, images, tally, f"{backbone} {what} at {at}")


@torch.no_grad()
def test_global_hooks(tally):
    """Of every module there is: a copy calls them as the model does."""
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 3)
    plain = model(images).logits

    def doubled(module, args, out):
        return 2 * out if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        tally(not torch.allclose(model(images).logits, plain), "the hook did nothing")
        tally(same(model.prepare()(images), model(images)), "a prepared copy does not call it")
        tally(same(model(images), model(images, layout="masked")), "packed is not masked")
    finally:
        handle.remove()


@torch.no_grad()
def test_averaged_weights_swapped_in_and_out(tally):
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 3)
    average = copy.deepcopy(model)
    for parameter in average.parameters():
        parameter.mul_(0.9)
    expected, own = average(images), model(images)
    for _ in range(2):
        for p, q in zip(model.parameters(), average.parameters()):
            held = p.data.clone()
            p.data.copy_(q.data)
            q.data.copy_(held)
        tally(same(model(images), expected), "swapped in")
        expected, own = own, expected
