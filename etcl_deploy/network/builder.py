"""A plan in the making: steps written one after another, each checked as it comes."""

from __future__ import annotations

from etcl_deploy.core.operations import Pair, Shape, fixed_windows
from etcl_deploy.core.plan import INPUT, Plan, Step, shape_of

Image = tuple[int, int, int]  # channels, height, width
EPS = 1e-5  # what torch's normalization layers add to the variance unless told otherwise


class PlanBuilder:
    """Steps and the shapes they give; each method returns the name of the last step it added."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.steps: list[Step] = []
        self.shapes: dict[str, Shape] = {INPUT: image}

    def add(self, name: str, op: str, *inputs: str, **settings: int | float | Pair) -> str:
        """One step. Raises PlanError, naming it, if it does not fit what it reads."""
        step = Step(name, op, inputs, settings)
        self.shapes[name] = shape_of(step, self.shapes)
        self.steps.append(step)
        return name

    def linear(self, name: str, x: str, out: int) -> str:
        """A linear layer."""
        return self.add(name, "linear", x, **{"in": self.shapes[x][0]}, out=out)

    def conv(self, name: str, x: str, out: int, kernel: int, *, stride: int = 1, padding: int = 0) -> str:
        """A convolution."""
        sizes = {"in": self.shapes[x][0], "out": out, "kernel": kernel, "stride": stride, "padding": padding}
        return self.add(name, "conv2d", x, **sizes, dilation=1, groups=1)

    def norm(self, name: str, x: str) -> str:
        """A batch normalization."""
        return self.add(name, "norm", x, features=self.shapes[x][0], eps=EPS)

    def adaptive_pool(self, name: str, op: str, x: str, output: Pair) -> str:
        """Pooling to a map of the size `output`, as fixed pooling; nothing where the map has that size."""
        _, height, width = self.shapes[x]
        if (height, width) == output:
            return x
        kernel, stride = fixed_windows((height, width), output)
        return self.add(name, op, x, kernel=single(kernel), stride=single(stride), padding=0)

    def plan(self, *, head_bias: bool) -> Plan:
        """The plan of all steps."""
        return Plan(self.image, tuple(self.steps), head_bias)


def single(pair: Pair) -> int | Pair:
    """One number for both where they are equal: a setting has one way to be written."""
    return pair[0] if pair[0] == pair[1] else pair
