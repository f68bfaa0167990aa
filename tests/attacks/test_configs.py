"""Hostile configs: every part of every family's config.json exchanged for what it must not be. Each is refused in one
sentence or loads, soon and in little memory; what is the owner's free text changes no answer."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.io.config import signed
from dwindle.methods.dynamicvit import DynamicViT
from dwindle.models.lm import MoD, adapt_lm
from dwindle.runtime.int8 import quantize
from shared.checkpoint import EXTRA, answer
from shared.tiny import METHODS, build

SECONDS, MEGABYTES = 5.0, 400


def _named() -> Any:
    import timm

    torch.manual_seed(0)
    return dwindle.adapt(timm.create_model("test_vit", img_size=32, num_classes=3), dwindle.AHT(stages=(2, 4))).eval()


def _charlm() -> Any:
    from dwindle.models.lm import TSA, CharLM, LMSize

    return adapt_lm(CharLM(LMSize(5, 2, 16, 2, 8)), TSA()).eval()


def _hf_lm(kind: str, config: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    model = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=5, **options))
    return adapt_lm(model, MoD()).eval()


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
LLAMA = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"intermediate_size": 32, "max_position_embeddings": 8},
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "timm_named": _named,
    "timm": lambda: build("vit", METHODS["AHT"]()),
    "timm_registers": lambda: build("registers", DynamicViT(stages=(1, 2))),
    "hf": lambda: build("hf_vit", METHODS["AViT"]()),
    "hf_dinov2": lambda: build("hf_registers", METHODS["TopK"]()),
    "int8": lambda: quantize(build("vit", METHODS["AHT"]())),
    "adaperceiver": lambda: dwindle.AdaPerceiver.preset("tiny", classes=3, readouts="own").eval(),
    "charlm": _charlm,
    "gpt2": lambda: _hf_lm("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "llama": lambda: _hf_lm("LlamaForCausalLM", "LlamaConfig", **LLAMA),
}
HOSTILE = [
    *(None, True, False, 0, -1, 1, 2, 3.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), -float("inf")),
    *(1 << 20, 1 << 31, 1 << 63, 10**30, 10**400, "", "x", "none", "\u0000\ud800 é 🦆", "a" * 1_000_000, "9" * 5000),
    *([], [1], [[]], [None] * 100_000, ["x", 1, None], {}, {"a": 1}, {"": {"": []}}),
    *("hf-hub:timm/vit_tiny_patch16_224", "local-dir:/tmp", "/etc/passwd", "kernels-community/flash-attn2"),
]


def deep(levels: int = 800) -> Any:
    nested: Any = 1
    for level in range(levels):
        nested = [nested] if level % 2 else {"a": nested}
    return nested


class Target:
    """A checkpoint whose config is exchanged."""

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        self.folder = dwindle.save(make(), folder, extra=EXTRA)
        self.config = json.loads((folder / "config.json").read_text())
        del self.config["config_sha256"]  # else nothing is reached but this
        self.expected = answer(dwindle.load(folder))

    def outcome(self, text: str, same: bool = False, loads: bool = True) -> str:
        """'' where it held; else what was wrong. same: it must answer as before. loads: it may."""
        (self.folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        begin = time.perf_counter()
        try:
            model = dwindle.load(self.folder)
            found = answer(model)
        except dwindle.DwindleError as error:
            said = str(error)
            model = None
            if len(said) > 2000 or "\n" in said or not said.isprintable():
                return f"no one sentence: {said[:200]!r}"
            if same:
                return f"refused: {said}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        if (spent := time.perf_counter() - begin) > SECONDS:
            return f"{spent:.1f} s"
        if model is not None and not loads:
            return "loaded"
        return "another answer" if same and not torch.equal(found, self.expected) else ""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def target(family: str) -> Target:
        if family not in made:
            made[family] = Target(tmp_path_factory.mktemp(family) / "ck", FAMILIES[family])
        return made[family]

    return target


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


def nodes(part: Any, path: tuple = ()) -> Iterator[tuple]:
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield (*path, key)
        yield from nodes(part[key], (*path, key))


def mutated(config: dict, chance: random.Random) -> tuple[str, str, bool]:
    """The config as text with one part changed; what was done; and whether it was the owner's own text."""
    config = json.loads(json.dumps(config))
    path = chance.choice(list(nodes(config)))
    owner: Any = config
    for key in path[:-1]:
        owner = owner[key]
    last, old = path[-1], owner[path[-1]]
    kind = chance.choice(["value"] * 6 + ["scaled", "gone", "more", "twice", "deep", "renamed"])
    new: Any = chance.choice(HOSTILE)
    if kind == "scaled" and type(old) in (int, float):
        new = old * chance.choice((-1, 2, 1000, 10**6, 10**9)) + chance.choice((0, 1, 0.5))
    if kind == "gone":
        del owner[last]
    elif kind == "more" and isinstance(owner, dict):
        owner[chance.choice(("x", "checkpoint_path", "pretrained_cfg", "é\ud800", "__class__", "self", "device"))] = new
    elif kind == "renamed" and isinstance(owner, dict):
        owner[str(last).upper()] = owner.pop(last)
    else:
        owner[last] = deep() if kind == "deep" else new
    text = json.dumps(config)
    if kind == "twice" and isinstance(last, str):
        text = text.replace(f'"{last}":', f'"{last}": {json.dumps(old)}, "{last}":', 1)
    free = path[:2] == ("extra", "note") or (path[:2] == ("extra", "results") and len(path) > 2)
    return text, f"{kind} {'.'.join(map(str, path))} = {str(new)[:60]!r}", free and kind != "deep"


@pytest.mark.parametrize("family", FAMILIES)
def test_any_part_of_a_config(family, targets, tally, many):
    target, chance = targets(family), random.Random(f"{family} 0")
    for _ in range(many(30, 1000)):
        text, what, free = mutated(target.config, chance)
        wrong = target.outcome(text, free)
        tally(not wrong, f"{what}: {wrong}")


def both(part: str, **options: Any) -> Callable[[dict], None]:
    return lambda config: config[part]["options"].update(options)


BAD: dict[str, list[Callable[[dict], Any]]] = {
    "timm_named": [
        *(both("backbone", **{name: "/etc/passwd"}) for name in ("checkpoint_path", "cache_dir", "pretrained_tag")),
        both("backbone", pretrained_cfg={"file": "/etc/passwd"}),
        both("backbone", pretrained_cfg_overlay={"hf_hub_id": "evil/evil"}),
        both("backbone", pretrained=True),
        both("backbone", features_only=True, out_indices=[0]),
        both("backbone", scriptable=True),
        both("backbone", depth=20_000),
        both("backbone", img_size=10**6),
        both("backbone", num_classes=10**10),
        *(
            lambda config, name=name: config["backbone"].update(model=name)
            for name in ("hf-hub:timm/vit_tiny", "local-dir:/tmp", "hf_hub:evil", "test_vit.hf-hub:x", "resnet18", "")
        ),
    ],
    "timm": [
        *(both("backbone", depth=depth) for depth in (20_000, 0, -1, 256, [4], 4.0, True)),
        *(both("backbone", embed_dim=width) for width in (10**7, 10**30, 0, 33)),
        *(both("backbone", img_size=size) for size in (10**6, [10**6, 10**6], -5, 0, [32], [], [32, 32, 32], "32")),
        *(both("backbone", patch_size=size) for size in (0, 1, 10**6, [0, 0])),
        *(both("backbone", **{name: 10**9}) for name in ("num_heads", "in_chans", "reg_tokens", "mlp_ratio")),
        both("backbone", mlp_ratio=float("nan")),
        both("backbone", norm_layer="torch.nn.BatchNorm1d"),
        both("backbone", block_fn="os.system"),
        both("method", stages=list(range(10**5))),
        both("method", stages=[1 << 40]),
        both("method", hidden=60_000),
        both("method", hidden=10**9),
        both("method", budget="1e400G"),
        both("method", neuron=-1),
        lambda config: config.update(weights="int8"),
        lambda config: config.update(saved="method"),
        lambda config: config.update(weights_sha256="0" * 64),
        lambda config: config.update(config_sha256="0" * 64),
        lambda config: config["method"].update(name="Method"),
        lambda config: config["method"].update(name="TopK"),
        lambda config: config["backbone"].update(family="hf"),
        lambda config: config["extra"].update(classes=3),
        lambda config: config["extra"].update(preprocess=[]),
    ],
    "hf": [
        *(both("backbone", **{name: "kernels-community/evil"}) for name in ("attn_implementation", "auto_map")),
        both("backbone", trust_remote_code=True),
        both("backbone", quantization_config={"quant_method": "bitsandbytes"}),
        both("backbone", per_layer_config={"0": {}}),
        both("backbone", num_labels=10**10),
        both("backbone", num_hidden_layers=256),
        both("backbone", hidden_act="__import__('os')"),
        both("backbone", id2label=["a"]),
        both("backbone", layer_norm_eps=-1),
        lambda config: config["backbone"].update(model="AutoModel"),
        lambda config: config["backbone"].update(model="GPT2LMHeadModel"),
    ],
    "adaperceiver": [
        *(both("backbone", **{name: 10**7}) for name in ("width", "depth", "heads", "image", "patch", "classes")),
        both("backbone", tokens=[4, 8, 10**9]),
        both("backbone", tokens=list(range(1, 5000))),
        both("backbone", widths=[32, 16]),
        both("backbone", depth=256, readouts="own"),
        both("backbone", ffn_ratio=1e-9),
        both("backbone", rope_theta=0),
    ],
    "charlm": [
        *(both("backbone", **{name: 10**9}) for name in ("vocabulary", "blocks", "width", "heads", "context")),
        both("backbone", **{"é\ud800": 1}),
        both("method", hidden=60_000),
        lambda config: config["method"].update(name="Control", options={"router": "TSA", "kind": "mean", "rates": []}),
    ],
    "gpt2": [
        both("backbone", n_positions=1 << 24),
        both("backbone", attn_implementation="kernels-community/evil"),
        both("backbone", add_cross_attention=True),
    ],
    "llama": [
        both("backbone", rope_parameters={"rope_type": "evil", "rope_theta": 1.0}),
        both("backbone", rope_parameters=deep()),
        both("backbone", pad_token_id=10**6),
        both("backbone", num_key_value_heads=3),
    ],
}


@pytest.mark.parametrize("family", BAD)
def test_what_must_be_refused(family, targets, tally, monkeypatch):
    """And nothing is unpickled on the way."""
    target = targets(family)
    opened = []
    monkeypatch.setattr(torch, "load", lambda *_, **__: opened.append("torch.load"))
    for number, change in enumerate(BAD[family]):
        config = json.loads(json.dumps(target.config))
        change(config)
        wrong = target.outcome(json.dumps(config), loads=False)
        tally(not wrong and not opened, f"{family} {number}: {wrong} {opened}")


def test_files_that_are_no_configs(targets, tally):
    target = targets("timm")
    whole = json.dumps(target.config)
    for text in (
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "null",
        "[]",
        "1",
        '"x"',
        "NaN",
        "9" * 10_000,
        "\ufeff" + whole,
    ):
        tally(not (wrong := target.outcome(text)), f"{text[:20]!r}: {wrong}")
    path = target.folder / "config.json"
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), 1 << 34)  # sparse: read, it would take 16 GB
    with pytest.raises(dwindle.DwindleError, match="has 17179869184 bytes"):
        dwindle.load(target.folder)


def test_what_is_signed_is_what_was_said(targets, tally):
    """Order and spaces do not count; any other number or name does."""
    target = targets("timm")
    good = signed(target.config)
    turned = dict(reversed(list(good.items())))
    tally(not target.outcome(json.dumps(turned, indent=7), same=True), "another order")
    for path in nodes(target.config):
        config = json.loads(json.dumps(good))
        owner: Any = config
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] = "changed"
        (target.folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(dwindle.DwindleError):
            dwindle.load(target.folder)
        tally(True, "")
