"""AdaPerceiver: one network whose number of tokens, depth and width are chosen when it runs.

B images, P input tokens, N latents, G granularities, L blocks, D width. Encode (Eq. 8-9), process (Eq. 10-12), decode
(Eq. 13); its parts are in network.py and blocks.py, the cost in cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.model import Output, check_finite
from ...core.registry import family_of
from ...core.trace import Trace
from ...errors import DwindleError, unknown
from .blocks import any_batch, numbers
from .cost import setting_macs, trace_macs
from .network import Network
from .settings import Choice, Exits, check, settings, trace_of

if TYPE_CHECKING:
    from .prepared import PreparedPerceiver

# What the text leaves open, by the authors' public code.
PUBLISHED: dict[str, Any] = {"rope": "pairs", "rope_beyond": "stretch", "norm_eps": 1e-6}
PRESETS: dict[str, dict[str, Any]] = {
    # C.7, but patches of 16: with the 14 printed there it has 143.7M parameters, with 16 the 143.8M of Table 5.
    "paper": PUBLISHED,
    # D.1: answers and features of ViT-H/14 CLIP, tuned on ImageNet-12K, whose patches are of 14 pixels.
    "paper_distill": PUBLISHED | {"patch": 14, "outputs": "both", "classes": 11821, "features": 1280},
    "paper_dense": PUBLISHED | {"patch": 14, "outputs": "dense", "head": "ffn", "classes": 1280},
    # DeiT-T's blocks, so that they can begin it; less than half its cost, of which the latents have nine tenths.
    "small": {
        "width": 192,
        "depth": 12,
        "heads": 3,
        "ffn_ratio": 4.0,
        "image": 160,
        "tokens": (16, 32, 48, 64, 96),
        "widths": (96, 144, 192),
        "layer_scale": 0.1,
    },
    "tiny": {
        "width": 32,
        "depth": 4,
        "heads": 2,
        "image": 32,
        "patch": 8,
        "tokens": (4, 8, 16),
        "widths": (16, 24, 32),
        "layer_scale": 0.5,
    },
}


@dataclass
class Answers:
    """What Algorithm 3 learns from: an answer at each granularity, and one at each depth for a sampled granularity."""

    tokens: Tensor  # (G, B, classes), dense (G, B, P, classes)
    depths: Tensor | None  # (L, B, ...)
    features: Answers | None = None  # of outputs = both


class AdaPerceiver(Network):
    """`model(images, tokens=96, depth=12, width=624)`; left out, each is the largest it was trained with.

    tokens, widths: those trained. outputs: 'class', one learned output token; 'dense', an answer for each patch;
    'both', the first with `features` numbers for each patch beside it, which are then `out.features`.
    head: 'linear'; 'mlp', or 'ffn' as published, for feature distillation (D.1). rope: which channels turn together,
    one of each half of a head or pairs next to each other. rope_beyond: more latents than trained turn on, or their
    angles are pressed into those trained. readouts: 'shared' by all depths (Eq. 13), or 'own': each
    depth has its output token, write head and classifier. mask: 'blocks', what a latent sees does not depend on how
    many follow (C.4); or 'open', asked for t latents all t see each other, and training draws the steps of the mask.
    """

    checks = True  # whether answers are looked at for NaN; on a GPU never, where each look would wait for it

    @classmethod
    def preset(cls, name: str = "paper", **changes: Any) -> AdaPerceiver:
        """A named configuration, with changes: `AdaPerceiver.preset("small", classes=100)`."""
        if name not in PRESETS:
            raise unknown("preset of AdaPerceiver", name, PRESETS)
        return cls(**PRESETS[name] | changes)

    def forward(
        self,
        images: Tensor,
        tokens: Choice = None,
        depth: Choice = None,
        width: Choice = None,
        exit: float | None = None,
        exits: Exits = None,
        patches: Tensor | None = None,
    ) -> Output:
        """Each setting is one number, or one per image. exit: leave where the answer's confidence reaches it; exits:
        after these blocks only, as each read-out costs something. patches: the images' input tokens, where they were
        computed already.

        What computes faster is for weights that stay: `prepare`.
        """
        out = self.run(images, tokens, depth, width, exit, exits, patches)
        if self.checks and not (self.training or images.is_cuda or torch.compiler.is_compiling()):
            check_finite(out.logits, images, self)
        return out

    def prepare(self, images: int | None = None, details: bool = False) -> PreparedPerceiver:
        """A copy for weights that stay, which answers as this machine computes fastest: `fast = model.prepare()`.

        What happens to this network afterwards does not reach it: prepare again after training.
        """
        return family_of(self).prepare(self)

    def run(
        self,
        images: Tensor,
        tokens: Choice = None,
        depth: Choice = None,
        width: Choice = None,
        exit: float | None = None,
        exits: Exits = None,
        patches: Tensor | None = None,
    ) -> Output:
        """`forward`, eager. Images are grouped by tokens and
        width, which are sliced; in a group those that are done leave. So no image's result depends on another's.
        """
        check(self, images, exit, exits)
        exit_depths = frozenset(range(1, self.depth) if exits is None else exits) if exit is not None else frozenset()
        count = len(images)
        t_B, d_B, w_B = settings(self, tokens, depth, width, count)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, setting in enumerate(zip(t_B, w_B)):
            groups.setdefault(setting, []).append(i)
        patches = self._patches(images, patches)
        left: list[int] = []  # images in the order in which they leave
        logits: list[Tensor] = []
        features: list[Tensor] = []
        stopped, reads = d_B.copy(), torch.zeros(self.depth, count, dtype=torch.bool)
        shrinks = exit is not None or len(groups) > 1 or len(set(d_B)) > 1
        with any_batch(shrinks and images.is_cuda):
            for (t, w), rows in sorted(groups.items()):
                mine = patches if len(rows) == count else patches.index_select(0, on(images.device, rows))
                for depth_done, some, answer, feature in self._group(
                    mine, rows, d_B, t, w, exit or 1.0, exit_depths, reads
                ):
                    left += some
                    logits.append(answer)
                    features.append(feature)
                    for i in some:
                        stopped[i] = depth_done
        trace = trace_of(self, images, t_B, stopped, w_B, reads)
        if len(logits) == 1:
            return Output(logits[0], trace, features[0])
        back = on(images.device, sorted(range(count), key=left.__getitem__))
        return Output(torch.cat(logits).index_select(0, back), trace, torch.cat(features).index_select(0, back))

    def _group(
        self,
        patches: Tensor,
        rows: list[int],
        d_B: list[int],
        t: int,
        w: int,
        exit: float,
        exit_depths: frozenset[int],
        reads: Tensor,
    ) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Run images of one token count and width; yields (depth, images, answers, output tokens) as they leave.

        exit_depths: after these blocks every image is read out, the host waits for the answers, and images leave whose
        confidence reaches `exit`. reads: (L, B), True is written for each image and depth that was read out.
        """
        turn, attend = self._prepare(t, patches)
        answers = self._answering(turn)
        z = self.read.latents(self.latent, patches, turn)  # (B, N, D)

        def read_out(at: int, who: Tensor | None, rows: list[int]) -> tuple[Tensor, Tensor]:
            reads[at - 1, rows] = True
            return answers(at, picked(z, who), self._asking(patches, who))

        for at, block in enumerate(self.blocks, 1):
            z = block(z, turn, attend, self.hidden(w))
            due = [d_B[i] <= at for i in rows]
            asks = at in exit_depths
            if not (asks or any(due)):
                continue
            if asks:  # everyone is read out
                answer, feature = read_out(at, None, rows)
                if not all(due):
                    sure = (answer.float().softmax(-1).amax(-1) >= exit).tolist()  # the one wait
                    due = [asked or done for asked, done in zip(due, sure)]
            gone = [n for n, leaves in enumerate(due) if leaves]
            stay = [n for n, leaves in enumerate(due) if not leaves]
            if not gone:
                continue
            leaving, staying = on(z.device, gone + stay).split([len(gone), len(stay)]) if stay else (None, None)
            some = [rows[n] for n in gone]
            if not asks:  # only those that leave are read out
                answer, feature = read_out(at, leaving, some)
            else:
                answer, feature = picked(answer, leaving), picked(feature, leaving)
            yield at, some, answer, feature
            if not stay:
                return
            rows = [rows[n] for n in stay]
            z, patches = picked(z, staying), self._asking(patches, staying)

    def _patches(self, images: Tensor, given: Tensor | None) -> Tensor:
        """The images' input tokens, where they were not given."""
        if given is None:
            return self.embed(images)
        wanted = (len(images), self.patches((images.shape[-2], images.shape[-1])), self.width)
        if given.shape != wanted:
            raise DwindleError(
                f"patches of shape {tuple(given.shape)}: these images have {wanted}; take model.embed's."
            )
        return given

    def _asking(self, patches: Tensor, who: Tensor | None) -> Tensor:
        """The patches of these images, where answers are read out by patch; else none of them is needed any more."""
        return patches if self.outputs == "class" else picked(patches, who)

    def answers(
        self,
        images: Tensor,
        widths: Tensor | None = None,
        sampled: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Answers:
        """Algorithm 3's forward pass: every granularity out of one run of the largest.

        widths: (B,) each image's own, masked. sampled: (L,) the granularity that each depth is read out with. drawn:
        (G,) bool, the steps that the mask has this time; answers at other granularities saw too much. Not given, it has
        all of them, also where it is open when the network runs.
        """
        patches = self.embed(images)
        largest = self.tokens[-1]
        if drawn is None:
            turn, attend = self._prepare(largest, patches, self.tokens)
        else:
            turn, attend = self._angles(largest, patches), self._attend_drawn(drawn)
        at = torch.arange(largest, device=images.device)
        kept = None
        if widths is not None:
            neurons = numbers(tuple(map(self.hidden, range(self.width + 1))), images.device)[widths]
            kept = (torch.arange(self.hidden(self.width), device=images.device) < neurons[:, None])[:, None]
            kept = kept.to(patches.dtype)
        z, answers = self.read.latents(self.latent, patches, turn), self._answering(turn)
        depths: list[tuple[Tensor, Tensor]] = []
        for depth, block in enumerate(self.blocks, 1):
            z = block(z, turn, attend, None, kept)
            if sampled is not None:
                answer, feature = answers(depth, z, patches, (at < sampled[depth - 1])[None])
                depths.append((answer[0], feature[0]))
        grains = at < numbers(self.tokens, images.device)[:, None]  # (G, N)
        answer, feature = answers(self.depth, z, patches, grains)
        two = self.outputs == "both"
        deep = [torch.stack([pair[i] for pair in depths]) if depths else None for i in range(1 + two)]
        return Answers(answer, deep[0], Answers(feature, deep[1]) if two else None)

    @torch.no_grad()
    def every(
        self,
        images: Tensor,
        width: int | None = None,
        depths: Sequence[int] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        """(L, G, B, classes): the answer at each depth, or at those asked for, and trained granularity; with the mask
        of C.4 out of one run. patches: as for `forward`.
        """
        wanted = range(1, self.depth + 1) if depths is None else depths
        if not wanted:
            raise DwindleError("depths is empty; name at least one, or leave it out for all.")
        _, _, (w, *_) = settings(self, None, wanted, width, len(wanted))
        patches = self._patches(images, patches)
        runs = [self.tokens] if self.mask == "blocks" else [(t,) for t in self.tokens]
        return torch.cat([self._nested(patches, nested, w, wanted) for nested in runs], 1)

    def _nested(self, patches: Tensor, tokens: Sequence[int], width: int, depths: Sequence[int]) -> Tensor:
        """(L, G, B, classes) of a run of the most of these tokens, in which the fewer are what they are alone."""
        turn, attend = self._prepare(tokens[-1], patches)
        at = torch.arange(tokens[-1], device=patches.device)
        grains = at < numbers(tuple(tokens), patches.device)[:, None]
        z = self.read.latents(self.latent, patches, turn)
        answers, found = self._answering(turn), {}
        for depth, block in enumerate(self.blocks[: max(depths)], 1):
            z = block(z, turn, attend, self.hidden(width))
            if depth in depths:
                found[depth] = answers(depth, z, patches, grains)[0]
        return torch.stack([found[depth] for depth in depths])

    def unwrap(self) -> nn.Module:
        raise DwindleError(
            "An AdaPerceiver is a network of its own, with no transformer in it to unwrap; use it as it is."
        )

    def macs(self, trace: Trace) -> Tensor:
        """(B,) multiply-accumulates of each image, read-outs counted."""
        return trace_macs(self, trace)

    def static_macs(self, trace: Trace | None = None) -> float:
        """The largest setting, read out once, with the mask of now; of a trace, for images of that size."""
        patches = None if trace is None else int(trace.values[0]["patches"][0, 0])
        return float(setting_macs(self, self.tokens[-1], self.depth, self.width, patches=patches))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse numbers of tokens that this network does not take."""
        settings(self, tokens, None, None, len(tokens))


def on(device: torch.device, rows: list[int]) -> Tensor:
    """A list of rows on the device. From pinned memory it gets there without waiting for what is under way."""
    here = torch.tensor(rows)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def picked(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
