"""Which setting for which image (I.1-I.4): fixed, early exit, a learned choice, and the oracle.

G granularities, L depths, W widths, C choices, n images. Policies are judged on a `Grid`, which holds what every
setting answers to every image; `AdaPerceiver.forward` with the same settings answers the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ...errors import DwindleError
from ...files import write_weights
from ...io.checkpoint import fill, read_weights
from .cost import setting_macs
from .grid import Batches, Grid, grid
from .grid import rows as settings
from .model import AdaPerceiver
from .settings import Exits

Option = tuple[int, int]  # tokens and depth, at full width
SOME = 4096  # training images that tell how many blocks a number of tokens can do with


class Learned(NamedTuple):
    """A learned policy, and what it chose for each test image (n,)."""

    kind: str  # 'tokens' or 'settings', what it chooses among
    price: float  # lambda of Eq. 14
    policy: PolicyNetwork
    picked: Tensor

    @property
    def file(self) -> str:
        return f"policy_{self.kind}_{self.price}.safetensors"


def result(policy: str, correct: Tensor, macs: Tensor, **more: Any) -> dict[str, Any]:
    """One row of Table 6."""
    top1, gmacs = 100 * correct.double().mean(), macs.double().mean() / 1e9
    return {"policy": policy, "top1": round(float(top1), 3), "gmacs": round(float(gmacs), 4), **more}


def fixed(model: AdaPerceiver, found: Grid) -> list[dict[str, Any]]:
    """I.1: the same tokens for all, full depth and width."""
    count = found.correct.shape[-1]
    return [
        result(
            f"fixed (t = {tokens})",
            found.correct[-1, -1, g],
            torch.full((count,), float(setting_macs(model, tokens, model.depth, model.width))),
        )
        for g, tokens in enumerate(model.tokens)
    ]


def exits(
    found: Grid, threshold: float, tokens: Tensor, most: Tensor | None = None, exit_depths: Exits = None
) -> Tensor:
    """(n,) the depth, from 1, at which each image is sure enough; tokens: (n,) index of its granularity; most: (n,) the
    depth at which it leaves in any case; looks: depths after which it may leave before, None: all.
    """
    at = torch.arange(len(tokens))
    sure = found.confidence[-1][:, tokens, at] >= threshold  # (L, n)
    if exit_depths is not None:
        sure[[depth - 1 for depth in range(1, len(sure) + 1) if depth not in exit_depths]] = False
    sure[-1] = True
    depths = sure.int().argmax(0) + 1
    return depths if most is None else depths.minimum(most)


def early_exit(
    model: AdaPerceiver,
    found: Grid,
    threshold: float,
    tokens: Tensor,
    most: Tensor | None = None,
    exit_depths: Exits = None,
) -> tuple[Tensor, Tensor]:
    """I.2, each image by its own confidence: what was right (n,), and the MACs with a read-out at every look."""
    at, depths = torch.arange(len(tokens)), exits(found, threshold, tokens, most, exit_depths)
    every = range(1, model.depth + 1)
    reads = {
        d: 1 + len([look for look in (every if exit_depths is None else set(exit_depths)) if look < d]) for d in every
    }
    price = torch.tensor(
        [[float(setting_macs(model, t, d, model.width, reads=reads[d])) for d in every] for t in model.tokens],
        dtype=torch.float64,
    )
    return found.correct[-1][depths - 1, tokens, at], price[tokens, depths - 1]


def oracle(model: AdaPerceiver, found: Grid) -> dict[str, Any]:
    """I.4: the cheapest setting that is right; where none is, the cheapest of all."""
    prices = torch.tensor(
        [
            [[float(setting_macs(model, t, d, w)) for t in model.tokens] for d in range(1, model.depth + 1)]
            for w in model.widths
        ],
        dtype=torch.float64,
    ).flatten()
    order = prices.argsort(stable=True)
    right = found.correct.flatten(0, 2)[order]  # (W L G, n), cheapest first
    chosen = right.int().argmax(0)
    return result("optimal", right.any(0), prices[order][chosen])


def token_choices(model: AdaPerceiver) -> list[Option]:
    """I.3: every trained number of tokens, at full depth."""
    return [(tokens, model.depth) for tokens in model.tokens]


def setting_choices(model: AdaPerceiver, found: Grid, within: float = 0.5) -> list[Option]:
    """For each number of tokens the fewest blocks within so many points of all, and the largest setting; cheapest
    first. The last blocks of few tokens cost more than they bring: more tokens do better with it. found: on training
    images, at full width.
    """
    top1 = found.top1[-1]  # (L, G)
    enough = (top1 >= top1[-1] - within).int().argmax(0) + 1
    chosen: set[Option] = {*zip(model.tokens, enough.tolist()), (model.tokens[-1], model.depth)}
    return sorted(chosen, key=lambda option: setting_macs(model, option[0], option[1], model.width))


class Mixer(nn.Module):
    """MLP-Mixer's block: an MLP over tokens, one over channels, at half and twice their size."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, tokens // 2), nn.GELU(), nn.Linear(tokens // 2, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class PolicyNetwork(nn.Module):
    """Algorithm 4, on input tokens (B, P, D) brought to `inner` channels first: at full width it would cost a block.

    choices: `token_choices` if not given.
    """

    def __init__(self, model: AdaPerceiver, choices: Sequence[Option] | None = None, inner: int | None = None) -> None:
        super().__init__()
        self.seq, self.dim, self.inner = model.patches(), model.width, inner or max(model.width // 4, 8)
        self.choices: list[Option] = [(tokens, depth) for tokens, depth in choices or token_choices(model)]
        self.squeeze = nn.Sequential(nn.LayerNorm(self.dim), nn.Linear(self.dim, self.inner))
        self.mixers = nn.Sequential(Mixer(self.inner, self.seq), Mixer(self.inner, self.seq))
        self.fuse = nn.Sequential(
            nn.LayerNorm(self.inner),
            nn.Linear(self.inner, self.inner),
            nn.GELU(),
            nn.Linear(self.inner, self.inner),
            nn.GELU(),
        )
        self.head = nn.Linear(self.inner, len(self.choices), bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, C) logits of the choices."""
        return self.head(self.fuse(self.mixers(self.squeeze(patches)).mean(1)))

    def choose(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B,) and depth (B,) for each image, of which `patches = model.embed(images)` are:
        `model(images, *policy.choose(patches), patches=patches)`.
        """
        tokens, depth = torch.tensor(self.choices, device=patches.device)[self(patches).argmax(-1)].unbind(-1)
        return tokens, depth

    @property
    def macs(self) -> int:
        s, i, half = self.seq, self.inner, self.seq // 2
        mixers = 2 * (2 * i * s * half + 2 * s * i * 2 * i)
        return s * self.dim * i + mixers + 2 * i * i + i * len(self.choices)


def save_policy(policy: PolicyNetwork, path: Path) -> Path:
    """A safetensors file, which knows what it chooses among."""
    weights = {name: value.cpu().contiguous() for name, value in policy.state_dict().items()}
    return write_weights(path, weights, {"choices": json.dumps(policy.choices)})


def load_policy(model: AdaPerceiver, path: str | Path) -> PolicyNetwork:
    """A policy that was learned for this network, ready to choose."""
    weights = read_weights(Path(path))
    with safe_open(path, "pt") as file:
        said = (file.metadata() or {}).get("choices")
    try:
        choices = [(int(tokens), int(depth)) for tokens, depth in json.loads(said or "[]")]
    except (ValueError, TypeError, RecursionError):
        choices = []
    if not choices:
        raise DwindleError(f"{path} holds no learned policy; take a file that dwindle policies --out wrote.")
    if any(tokens not in model.tokens or not 1 <= depth <= model.depth for tokens, depth in choices):
        raise DwindleError(
            f"{path} chooses (tokens, depth) among {choices}, and this network has tokens {model.tokens} and "
            f"{model.depth} blocks; learn a policy for it with dwindle policies --out."
        )
    policy = PolicyNetwork(model, choices)
    fill(policy, weights, Path(path))
    return policy.eval().requires_grad_(False)


def train_policies(
    model: AdaPerceiver,
    epochs: Iterable[Batches],
    wanted: Sequence[tuple[float, Sequence[Option]]],
    *,
    lr: float = 1e-3,
    decay: float = 0.99,
    entropy: float = 0.01,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[PolicyNetwork]:
    """REINFORCE (I.3), a policy for each (price, choices) wanted, all from the same runs of the network: reward -CE -
    price * index of the choice (Eq. 14), each image's own advantage over the moving average of past rewards. entropy: a
    bonus that keeps the choice open while the baseline settles; not in the paper.
    """
    place = torch.device(device)
    fast = model.eval().to(place).prepare()
    learners = [_Learner(model, choices, price, place, lr, decay, entropy, seed) for price, choices in wanted]
    depths = sorted({depth for _, choices in wanted for _, depth in choices})
    for batches in epochs:
        for x, y in batches:
            x, y = x.to(place), y.to(place)
            with torch.no_grad(), torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
                patches = fast.embed(x)
                said = fast.every(x, depths=depths, patches=patches)  # (L, G, B, classes)
            answers = said.flatten(0, 2).float()
            loss = F.cross_entropy(answers, y.repeat(len(answers) // len(y)), reduction="none").view(said.shape[:3])
            for learner in learners:
                asked = [loss[depths.index(d), model.tokens.index(t)] for t, d in learner.policy.choices]
                learner.step(patches.float(), torch.stack(asked))
            if progress:
                progress(len(y))
    return [learner.policy.eval() for learner in learners]


class _Learner:
    """A policy with its optimiser, its baseline and its own chance: what it learns does not depend on the others."""

    def __init__(
        self,
        model: AdaPerceiver,
        choices: Sequence[Option],
        price: float,
        place: torch.device,
        lr: float,
        decay: float,
        entropy: float,
        seed: int,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = PolicyNetwork(model, choices).to(place)
        self.draw = torch.Generator(place).manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr)
        self.price, self.decay, self.entropy = price, decay, entropy
        self.baseline: Tensor | None = None

    def step(self, patches: Tensor, loss_CB: Tensor) -> None:
        says = self.policy(patches).log_softmax(-1)  # (B, C)
        action = torch.multinomial(says.detach().exp(), 1, generator=self.draw)  # (B, 1)
        reward = -loss_CB.T.gather(1, action)[:, 0] - self.price * action[:, 0]
        baseline = reward.mean() if self.baseline is None else self.baseline
        open_ = -(says.exp() * says).sum(-1).mean()
        loss = -((reward - baseline) * says.gather(1, action)[:, 0]).mean() - self.entropy * open_
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.baseline = self.decay * baseline + (1 - self.decay) * reward.mean()


@torch.no_grad()
def choices(
    model: AdaPerceiver, policies: Sequence[PolicyNetwork], batches: Batches, device: str | torch.device = "cpu"
) -> Tensor:
    """(policies, n) index of the choice that each policy makes for each image."""
    place, made = torch.device(device), []
    for x, _ in batches:
        patches = model.embed(x.to(place))
        made.append(torch.stack([policy(patches).argmax(-1).cpu() for policy in policies]))
    return torch.cat(made, 1)


def learned(
    model: AdaPerceiver,
    found: Grid,
    policy: PolicyNetwork,
    picked: Tensor,
    price: float,
    threshold: float | None = None,
) -> dict[str, Any]:
    """I.3's row, the policy network counted; with a threshold, early exit on top."""
    kind = "tokens" if policy.choices == token_choices(model) else "settings"
    tokens = torch.tensor([model.tokens.index(t) for t, _ in policy.choices])[picked]
    depths = torch.tensor([depth for _, depth in policy.choices])[picked]
    if threshold is not None:
        correct, macs = early_exit(model, found, threshold, tokens, depths)
        return result(f"RL ({kind}, lambda = {price}, tau = {threshold})", correct, macs + policy.macs)
    prices = torch.tensor([float(setting_macs(model, t, d, model.width)) for t, d in policy.choices])
    correct = found.correct[-1][depths - 1, tokens, torch.arange(len(picked))]
    shares = torch.bincount(picked, minlength=len(policy.choices)).double() / len(picked)
    more = {"choices": policy.choices, "shares": [round(float(s), 3) for s in shares]}
    return result(f"RL ({kind}, lambda = {price})", correct, prices[picked] + policy.macs, **more)


def judged(
    model: AdaPerceiver,
    test: Callable[[], Batches],
    training: Callable[[int], Batches],
    thresholds: Sequence[float],
    prices: Sequence[float],
    epochs: int,
    *,
    exit_depths: Exits = None,
    amp: bool = True,
    device: str | torch.device = "cpu",
    progress: Callable[[str, int], None] = lambda what, images: None,
) -> tuple[list[dict[str, Any]], list[Learned]]:
    """Table 6 from scratch, with a policy of either kind learned for each price in so many epochs; 0: none.

    test(): the batches that are judged. training(epoch): those learned from. progress: told what is done with how many
    images.
    """
    found = grid(model, test(), device=device, amp=amp, progress=lambda n: progress("every setting", n))
    made: list[Learned] = []
    if epochs > 0 and prices:
        seen = grid(model, _first(training(0), SOME), device=device, amp=amp, widths=model.widths[-1:])
        kinds = {"tokens": token_choices(model), "settings": setting_choices(model, seen)}
        if kinds["settings"] == kinds["tokens"]:  # no number of tokens can do with fewer blocks
            del kinds["settings"]
        wanted = [(kind, price) for kind in kinds for price in prices]
        policies = train_policies(
            model,
            map(training, range(epochs)),
            [(price, kinds[kind]) for kind, price in wanted],
            device=device,
            progress=lambda n: progress("learned policies", n),
        )
        picks = choices(model, policies, test(), device)
        made = [Learned(*what, policy, picked) for what, policy, picked in zip(wanted, policies, picks)]
    return table_6(model, found, [(one.price, one.policy, one.picked) for one in made], thresholds, exit_depths), made


def _first(batches: Batches, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches as hold so many images."""
    for x, y in batches:
        yield x, y
        images -= len(y)
        if images <= 0:
            return


def table_6(
    model: AdaPerceiver,
    found: Grid,
    policies: Sequence[tuple[float, PolicyNetwork, Tensor]] = (),
    thresholds: Sequence[float] = (0.8, 0.9, 0.95),
    exit_depths: Exits = None,
) -> list[dict[str, Any]]:
    """Every policy; where looks are given, early exit after these blocks only, beside that after all. Beside each row:
    `fixed_top1`, what the trained numbers of tokens reach at its cost, between two by share; `best_fixed_top1`, the
    best of all fixed settings (tokens, depth, width) that cost no more.
    """
    if model.outputs != "class":
        raise DwindleError(
            "Policies choose by the answer to a whole image, and this network is dense; give one that classifies."
        )
    plain = fixed(model, found)
    rows = list(plain)
    count = found.correct.shape[-1]
    for threshold in thresholds:
        for g, tokens in enumerate(model.tokens):
            for some in (None, exit_depths) if exit_depths else (None,):
                correct, macs = early_exit(model, found, threshold, torch.full((count,), g), exit_depths=some)
                after = f", after {'-'.join(map(str, some))}" if some else ""
                rows.append(result(f"exit (t = {tokens}, tau = {threshold}{after})", correct, macs))
    for price, policy, picked in policies:
        rows.append(learned(model, found, policy, picked, price))
        rows += [learned(model, found, policy, picked, price, threshold) for threshold in thresholds]
    rows.append(oracle(model, found))
    cost, top1 = [row["gmacs"] for row in plain], [row["top1"] for row in plain]
    every = settings(model, found)
    return [
        row
        | {
            "fixed_top1": round(float(np.interp(row["gmacs"], cost, top1)), 3),
            "best_fixed_top1": max((r["top1"] for r in every if r["gmacs"] <= row["gmacs"]), default=0.0),
        }
        for row in rows
    ]
