"""A smaller image: what any method that leaves out tokens has to beat where images are redundant."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import budget_share, static_macs
from ..core.method import Method, Verdict
from ..core.tokens import Tokens
from ..ops.patches import resized
from ..settings import Budget, Within


class Resolution(Method):
    """The static model on the image made smaller. Its positions are resampled to the grid of patches that is left.

    Its cost is the smaller image's. Making it smaller is not counted: who knows the size reads images so.
    """

    needs_training = False
    keeps_prefix = True
    paper = "the wrapped model on a smaller image"

    def __init__(self, scale: Annotated[float, Within(0, 1, over=True)] = 0.75, budget: Budget = None) -> None:
        """
        scale: share of the image's sides that is left, rounded to whole patches.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `scale` to the size of the nearest cost.
        """
        super().__init__()
        self.scale, self.budget = scale, budget

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        longer = max(shape.grid())
        self.operating_point = ("scale", 1 / longer, 1.0)
        if self.budget is not None:
            goal = budget_share(self.budget, shape)
            self.scale = min(
                (patches / longer for patches in range(1, longer + 1)), key=lambda scale: abs(self._cost(scale) - goal)
            )

    @property
    def config(self) -> dict[str, Any]:
        """scale as it stands: what the budget came to, or what it was turned to since."""
        return super().config | ({"budget": None} if hasattr(self, "shape") else {})

    def _cost(self, scale: float) -> float:
        return static_macs(self.shape, self.size(self.shape.image, scale)) / static_macs(self.shape)

    def size(self, image: tuple[int, int], scale: float) -> tuple[int, int]:
        """Of what is left of an image of this size: whole patches, one at least."""
        rows, columns = (max(1, int(scale * patches + 0.5)) for patches in self.shape.grid(image))
        return rows * self.shape.patch[0], columns * self.shape.patch[1]

    def seen_size(self, image: tuple[int, int]) -> tuple[int, int]:
        return self.size(image, self.scale)

    def seen(self, images: Tensor) -> Tensor:
        full = (images.shape[-2], images.shape[-1])
        size = self.seen_size(full)
        return images if size == full else resized(images, size)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        return Verdict(tokens.decide(depth, None))
