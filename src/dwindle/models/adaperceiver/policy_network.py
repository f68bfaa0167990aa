"""A learned choice of setting for each image (I.3): the policy network, its training, and its file.

B images, P input tokens, D width, C choices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from ...errors import DwindleError
from ...files import write_weights
from ...io.checkpoint import fill, read_weights
from .cost import setting_macs
from .grid import Batches, Grid
from .model import AdaPerceiver

Option = tuple[int, int]  # tokens and depth, at full width


def token_choices(model: AdaPerceiver) -> list[Option]:
    """The choices of I.3: every trained number of tokens, at full depth."""
    return [(tokens, model.depth) for tokens in model.tokens]


def setting_choices(model: AdaPerceiver, found: Grid, within: float = 0.5) -> list[Option]:
    """For each number of tokens the fewest blocks whose top-1 is at most `within` points below that of all blocks, and
    the largest setting; cheapest first. With few tokens the last blocks gain less than more tokens would at that cost.
    found: on training images, at full width.
    """
    top1 = found.top1[-1]  # (L, G)
    enough = (top1 >= top1[-1] - within).int().argmax(0) + 1
    chosen: set[Option] = {*zip(model.tokens, enough.tolist()), (model.tokens[-1], model.depth)}
    return sorted(chosen, key=lambda option: setting_macs(model, option[0], option[1], model.width))


class Mixer(nn.Module):
    """MLP-Mixer's block: an MLP over tokens with half as many neurons, and one over channels with twice as many."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, tokens // 2), nn.GELU(), nn.Linear(tokens // 2, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class PolicyNetwork(nn.Module):
    """Algorithm 4 on input tokens (B, P, D), projected to `inner` channels; at full width it would cost like a block.

    choices: None: `token_choices`. inner: None: a quarter of the width, at least 8.
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
        """Tokens (B,) and depth (B,) for images, from `patches = model.embed(images)`:
        `model(images, *policy.choose(patches), patches=patches)`.
        """
        tokens, depth = torch.tensor(self.choices, device=patches.device)[self(patches).argmax(-1)].unbind(-1)
        return tokens, depth

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one image."""
        s, i, half = self.seq, self.inner, self.seq // 2
        mixers = 2 * (2 * i * s * half + 2 * s * i * 2 * i)
        return s * self.dim * i + mixers + 2 * i * i + i * len(self.choices)


def save_policy(policy: PolicyNetwork, path: Path) -> Path:
    """Write the policy to a safetensors file, whose metadata hold its choices; returns the path."""
    weights = {name: value.cpu().contiguous() for name, value in policy.state_dict().items()}
    return write_weights(path, weights, {"choices": json.dumps(policy.choices)})


def load_policy(model: AdaPerceiver, path: str | Path) -> PolicyNetwork:
    """The policy of a file, in eval mode; refused if its choices are not settings of this network."""
    weights = read_weights(Path(path))
    with safe_open(path, "pt") as file:
        listed = (file.metadata() or {}).get("choices")
    try:
        choices = [(int(tokens), int(depth)) for tokens, depth in json.loads(listed or "[]")]
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
    """Trains by REINFORCE (I.3) a policy for each (price, choices) in `wanted`, all on the same runs of the network.

    The reward is -CE - price * index of the choice (Eq. 14), its baseline the moving average of past rewards, with
    `decay`. entropy: weight of an entropy bonus, which keeps the policy random while the baseline settles; it is not in
    the paper.
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
                logits = fast.every(x, depths=depths, patches=patches)  # (L, G, B, classes)
            answers = logits.flatten(0, 2).float()
            loss = F.cross_entropy(answers, y.repeat(len(answers) // len(y)), reduction="none").view(logits.shape[:3])
            for learner in learners:
                losses = [loss[depths.index(d), model.tokens.index(t)] for t, d in learner.policy.choices]
                learner.step(patches.float(), torch.stack(losses))
            if progress:
                progress(len(y))
    return [learner.policy.eval() for learner in learners]


class _Learner:
    """A policy with its own optimizer, baseline and random numbers, so that it does not depend on the others."""

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
        """One update. loss_CB: the network's cross-entropy at each choice."""
        log_p = self.policy(patches).log_softmax(-1)  # (B, C)
        action = torch.multinomial(log_p.detach().exp(), 1, generator=self.draw)  # (B, 1)
        reward = -loss_CB.T.gather(1, action)[:, 0] - self.price * action[:, 0]
        baseline = reward.mean() if self.baseline is None else self.baseline
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        loss = -((reward - baseline) * log_p.gather(1, action)[:, 0]).mean() - self.entropy * entropy
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.baseline = self.decay * baseline + (1 - self.decay) * reward.mean()


@torch.no_grad()
def choices(
    model: AdaPerceiver, policies: Sequence[PolicyNetwork], batches: Batches, device: str | torch.device = "cpu"
) -> Tensor:
    """(policies, n) index of each policy's choice for each image."""
    place, made = torch.device(device), []
    for x, _ in batches:
        patches = model.embed(x.to(place))
        made.append(torch.stack([policy(patches).argmax(-1).cpu() for policy in policies]))
    return torch.cat(made, 1)
