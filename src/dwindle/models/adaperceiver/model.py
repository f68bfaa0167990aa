"""AdaPerceiver: one network whose number of tokens, depth and width are chosen when it runs.

B images, P input tokens, N latents, G granularities, L blocks, D width. Encode (Eq. 8-9), process (Eq. 10-12), decode
(Eq. 13). The parts are in network.py and blocks.py, the cost in cost.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.checks import check_finite
from ...core.model import Output
from ...core.registry import family_of
from ...core.trace import Trace
from ...errors import DwindleError, unknown
from .blocks import any_batch, int_tensor
from .cost import setting_macs, trace_macs
from .network import Network
from .settings import Choice, Exits, check, settings, trace_of

if TYPE_CHECKING:
    from .prepared import PreparedPerceiver

# What the paper leaves open is set as in the authors' public code.
PUBLISHED: dict[str, Any] = {"rope": "pairs", "rope_beyond": "stretch", "norm_eps": 1e-6}
PRESETS: dict[str, dict[str, Any]] = {
    # C.7, but patches of 16: with the 14 printed there it has 143.7M parameters, with 16 the 143.8M of Table 5.
    "paper": PUBLISHED,
    # D.1: answers and features of ViT-H/14 CLIP, tuned on ImageNet-12K, whose patches are of 14 pixels.
    "paper_distill": PUBLISHED | {"patch": 14, "outputs": "both", "classes": 11821, "features": 1280},
    "paper_dense": PUBLISHED | {"patch": 14, "outputs": "dense", "head": "ffn", "classes": 1280},
    # Its blocks have the shape of DeiT-T's, so that training can begin from DeiT-T's weights. It costs less than half
    # as much, and nine tenths of that are for the latents.
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
    """What Algorithm 3 trains: answers at each granularity, and answers at each depth for one sampled granularity."""

    tokens: Tensor  # (G, B, classes), dense (G, B, P, classes)
    depths: Tensor | None  # (L, B, ...); None: no granularity was sampled
    features: Answers | None = None  # with outputs = 'both', the patches' features in the same form


class AdaPerceiver(Network):
    """The network: `model(images, tokens=96, depth=12, width=624)`; a setting left out is the largest one trained.

    tokens, widths: the settings that are trained. outputs: 'class': one answer, from a learned output token; 'dense':
    an answer for each patch; 'both': one answer, and `features` numbers for each patch as `out.features`. head:
    'linear'; 'mlp', or 'ffn' as published, for feature distillation (D.1). rope: which two channels an angle rotates:
    'halves': one of each half of a head; 'pairs': neighbours. rope_beyond: for more latents than were trained, angles
    'continue', or frequencies are divided so that the angles 'stretch' over the trained range. readouts: 'shared' by
    all depths (Eq. 13), or 'own': each depth has its output token, write head and classifier. mask: 'blocks': what a
    latent sees does not depend on how many follow (C.4); 'open': all t latents see each other, and training draws the
    steps of the mask.
    """

    checks = True  # whether answers are checked for NaN; on a GPU they never are, as each check would wait for it

    @classmethod
    def preset(cls, name: str = "paper", **changes: Any) -> AdaPerceiver:
        """A network of a named configuration, with changes: `AdaPerceiver.preset("small", classes=100)`."""
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
        """Answers to images (B, C, H, W), with the trace. Each setting is one number, or one per image.

        exit: an image leaves after the first block whose answer reaches this confidence. exits: images may leave after
        these blocks only, as each read-out costs something. patches: `embed(images)`, if already computed. For weights
        that stay, `prepare` gives a faster form.
        """
        out = self.run(images, tokens, depth, width, exit, exits, patches)
        if self.checks and not (self.training or images.is_cuda or torch.compiler.is_compiling()):
            check_finite(out.logits, images, self)
        return out

    def prepare(self, images: int | None = None, details: bool = False) -> PreparedPerceiver:
        """A copy with fixed weights, in the form that this machine runs fastest: `fast = model.prepare()`.

        Later changes of this network do not reach the copy: prepare again after training. images, details: as
        `AdaptiveViT.prepare` takes them; nothing depends on them here.
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
        """`forward` without the check for NaN; the definition that recordings are compared with.

        Images of one token count and width form a group and run on slices of the weights; images that are done leave
        their group. So no image's result depends on another's.
        """
        check(self, images, exit, exits)
        exit_depths = frozenset(range(1, self.depth) if exits is None else exits) if exit is not None else frozenset()
        count = len(images)
        t_B, d_B, w_B = settings(self, tokens, depth, width, count)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, setting in enumerate(zip(t_B, w_B)):
            groups.setdefault(setting, []).append(i)
        patches = self._patches(images, patches)
        left: list[int] = []  # images, in the order in which they leave
        logits: list[Tensor] = []
        features: list[Tensor] = []
        stopped, reads = d_B.copy(), torch.zeros(self.depth, count, dtype=torch.bool)
        shrinks = exit is not None or len(groups) > 1 or len(set(d_B)) > 1
        with any_batch(shrinks and images.is_cuda):
            for (t, w), rows in sorted(groups.items()):
                mine = patches if len(rows) == count else patches.index_select(0, index_on(images.device, rows))
                for stop, leaving, answer, feature in self._group(
                    mine, rows, d_B, t, w, exit or 1.0, exit_depths, reads
                ):
                    left += leaving
                    logits.append(answer)
                    features.append(feature)
                    for i in leaving:
                        stopped[i] = stop
        trace = trace_of(self, images, t_B, stopped, w_B, reads)
        if len(logits) == 1:
            return Output(logits[0], trace, features[0])
        back = index_on(images.device, sorted(range(count), key=left.__getitem__))
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
        """Runs images of one token count and width; yields (depth, images, answers, output tokens) as images leave.

        exit_depths: after these blocks every image is read out, the host waits for the answers, and images whose
        confidence reaches `exit` leave. reads (L, B) bool: set to True for each image and depth that is read out.
        """
        angles, attend = self._angles_and_attention(t, patches)
        answer_at = self._readout_function(angles)
        z = self.read.latents(self.latent, patches, angles)  # (B, N, D)

        def read_out(at: int, who: Tensor | None, rows: list[int]) -> tuple[Tensor, Tensor]:
            reads[at - 1, rows] = True
            return answer_at(at, selected(z, who), self._needed_patches(patches, who))

        for at, block in enumerate(self.blocks, 1):
            z = block(z, angles, attend, self.hidden(w))
            due = [d_B[i] <= at for i in rows]
            may_exit = at in exit_depths
            if not (may_exit or any(due)):
                continue
            if may_exit:  # all images are read out
                answer, feature = read_out(at, None, rows)
                if not all(due):
                    sure = (answer.float().softmax(-1).amax(-1) >= exit).tolist()  # waits for the device
                    due = [last or confident for last, confident in zip(due, sure)]
            leave = [n for n, leaves in enumerate(due) if leaves]
            stay = [n for n, leaves in enumerate(due) if not leaves]
            if not leave:
                continue
            leaving, staying = index_on(z.device, leave + stay).split([len(leave), len(stay)]) if stay else (None, None)
            images = [rows[n] for n in leave]
            if not may_exit:  # only the images that leave are read out
                answer, feature = read_out(at, leaving, images)
            else:
                answer, feature = selected(answer, leaving), selected(feature, leaving)
            yield at, images, answer, feature
            if not stay:
                return
            rows = [rows[n] for n in stay]
            z, patches = selected(z, staying), self._needed_patches(patches, staying)

    def _patches(self, images: Tensor, patches: Tensor | None) -> Tensor:
        """`patches`, checked to be of the images' shape; None: computed."""
        if patches is None:
            return self.embed(images)
        expected = (len(images), self.patches((images.shape[-2], images.shape[-1])), self.width)
        if patches.shape != expected:
            raise DwindleError(
                f"patches of shape {tuple(patches.shape)}: these images have {expected}; take model.embed's."
            )
        return patches

    def _needed_patches(self, patches: Tensor, who: Tensor | None) -> Tensor:
        """The patches of the images `who`. A network that only classifies reads none of them out, so it keeps all."""
        return patches if self.outputs == "class" else selected(patches, who)

    def answers(
        self,
        images: Tensor,
        widths: Tensor | None = None,
        sampled: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> Answers:
        """Algorithm 3's forward pass: answers at every granularity from one run of the largest.

        widths (B,): each image's width, applied by masking. sampled (L,): the granularity that each depth is read out
        with. drawn (G,) bool: which steps the mask has in this call; answers at the other granularities are no valid
        ones, as their latents saw later ones. None: all steps, even if the network's mask is open.
        """
        patches = self.embed(images)
        largest = self.tokens[-1]
        if drawn is None:
            angles, attend = self._angles_and_attention(largest, patches, self.tokens)
        else:
            angles, attend = self._angles(largest, patches), self._attend_drawn(drawn)
        at = torch.arange(largest, device=images.device)
        kept = None
        if widths is not None:
            neurons = int_tensor(tuple(map(self.hidden, range(self.width + 1))), images.device)[widths]
            kept = (torch.arange(self.hidden(self.width), device=images.device) < neurons[:, None])[:, None]
            kept = kept.to(patches.dtype)
        z, answer_at = self.read.latents(self.latent, patches, angles), self._readout_function(angles)
        depths: list[tuple[Tensor, Tensor]] = []
        for depth, block in enumerate(self.blocks, 1):
            z = block(z, angles, attend, None, kept)
            if sampled is not None:
                answer, feature = answer_at(depth, z, patches, (at < sampled[depth - 1])[None])
                depths.append((answer[0], feature[0]))
        grains = at < int_tensor(self.tokens, images.device)[:, None]  # (G, N)
        answer, feature = answer_at(self.depth, z, patches, grains)
        both = self.outputs == "both"
        deep = [torch.stack([pair[i] for pair in depths]) if depths else None for i in range(1 + both)]
        return Answers(answer, deep[0], Answers(feature, deep[1]) if both else None)

    @torch.no_grad()
    def every(
        self,
        images: Tensor,
        width: int | None = None,
        depths: Sequence[int] | None = None,
        patches: Tensor | None = None,
    ) -> Tensor:
        """(L, G, B, classes): the answers at each depth (all, or `depths`) and each trained granularity. With the mask
        of C.4 one run gives them all. patches: as for `forward`.
        """
        wanted = range(1, self.depth + 1) if depths is None else depths
        if not wanted:
            raise DwindleError("depths is empty; name at least one, or leave it out for all.")
        _, _, (w, *_) = settings(self, None, wanted, width, len(wanted))
        patches = self._patches(images, patches)
        runs = [self.tokens] if self.mask == "blocks" else [(t,) for t in self.tokens]
        return torch.cat([self._nested(patches, nested, w, wanted) for nested in runs], 1)

    def _nested(self, patches: Tensor, tokens: Sequence[int], width: int, depths: Sequence[int]) -> Tensor:
        """(L, G, B, classes) from one run of the largest of these token counts. The mask makes its first t latents the
        same as those of a run of t."""
        angles, attend = self._angles_and_attention(tokens[-1], patches)
        at = torch.arange(tokens[-1], device=patches.device)
        grains = at < int_tensor(tuple(tokens), patches.device)[:, None]
        z = self.read.latents(self.latent, patches, angles)
        answer_at, answers = self._readout_function(angles), {}
        for depth, block in enumerate(self.blocks[: max(depths)], 1):
            z = block(z, angles, attend, self.hidden(width))
            if depth in depths:
                answers[depth] = answer_at(depth, z, patches, grains)[0]
        return torch.stack([answers[depth] for depth in depths])

    def unwrap(self) -> nn.Module:
        raise DwindleError(
            "An AdaPerceiver is a network of its own, with no transformer in it to unwrap; use it as it is."
        )

    def macs(self, trace: Trace) -> Tensor:
        """(B,) multiply-accumulates of each image, with read-outs."""
        return trace_macs(self, trace)

    def static_macs(self, trace: Trace | None = None) -> float:
        """Multiply-accumulates of an image at the largest setting, read out once, with the network's present mask.
        trace: for images of this trace's size; None: of the trained size."""
        patches = None if trace is None else int(trace.values[0]["patches"][0, 0])
        return float(setting_macs(self, self.tokens[-1], self.depth, self.width, patches=patches))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises for numbers of tokens that this network does not take."""
        settings(self, tokens, None, None, len(tokens))


def index_on(device: torch.device, rows: list[int]) -> Tensor:
    """A list of rows as an index on the device. From pinned memory the copy does not wait for running kernels."""
    index = torch.tensor(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of x; None: all."""
    return x if rows is None else x.index_select(0, rows)
