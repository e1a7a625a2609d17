"""The networks that ship with the package, as plans (section 7 of the method's description)."""

from __future__ import annotations

from collections.abc import Callable

from etcl_deploy.plan import INPUT, Plan, Step

Image = tuple[int, int, int]  # channels, height, width


class _Draft:
    """Steps written one after another; each method gives the name of the step it added."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.steps: list[Step] = []

    def add(self, name: str, op: str, *inputs: str, **settings: int) -> str:
        self.steps.append(Step(name, op, inputs, settings))
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        if name == INPUT:
            return self.image
        flat = Step("flat", "flatten", (self.steps[-1].name,), {})
        return Plan(self.image, (*self.steps, flat), head_bias=False).shapes[name]

    def linear(self, name: str, x: str, out: int) -> str:
        return self.add(name, "linear", x, **{"in": self.shape(x)[0]}, out=out)

    def conv_norm(self, name: str, x: str, out: int, kernel: int, stride: int = 1) -> str:
        """A convolution that keeps the size (at stride 1), and its normalization."""
        sizes = {"in": self.shape(x)[0], "out": out, "kernel": kernel, "stride": stride}
        conv = self.add(f"{name}_conv", "conv2d", x, **sizes, padding=kernel // 2)
        return self.add(f"{name}_norm", "norm", conv, features=out)


def fcn3(image: Image, width: int = 100) -> Plan:
    """in -> width -> width -> head, ReLU."""
    draft = _Draft(image)
    x = draft.add("flatten", "flatten", INPUT)
    for name in ("fc1", "fc2"):
        x = draft.add(f"{name}_relu", "relu", draft.linear(name, x, width))
    return Plan(image, tuple(draft.steps), head_bias=True)


def resnet18(image: Image, width: int = 20) -> Plan:
    """Reduced ResNet-18: 3x3 stem, four stages of two blocks, `width` to `8 * width` channels, 2x2 average."""
    draft = _Draft(image)
    x = draft.add("stem_relu", "relu", draft.conv_norm("stem", INPUT, width, 3))
    for stage in range(4):
        for block in range(2):
            x = _basic_block(draft, f"stage{stage + 1}_{block + 1}", x, width << stage, block == 0)
    x = _average_to_2x2(draft, x)
    draft.add("features", "flatten", x)
    return Plan(image, tuple(draft.steps), head_bias=False)


def _basic_block(draft: _Draft, name: str, x: str, out: int, first: bool) -> str:
    channels = draft.shape(x)[0]
    stride = 2 if first and channels != out else 1
    y = draft.conv_norm(f"{name}_a", x, out, 3, stride)
    y = draft.add(f"{name}_a_relu", "relu", y)
    y = draft.conv_norm(f"{name}_b", y, out, 3)
    shortcut = x if channels == out else draft.conv_norm(f"{name}_shortcut", x, out, 1, stride)
    y = draft.add(f"{name}_sum", "add", y, shortcut)
    return draft.add(f"{name}_relu", "relu", y)


def _average_to_2x2(draft: _Draft, x: str) -> str:
    """Adaptive average pooling to 2x2, resolved for the size at hand; a 1-pixel map stays as it is."""
    _, height, side = draft.shape(x)
    if height != side:
        raise ValueError("resnet18 takes square images")
    if side < 2:
        return x
    # Windows [0, ceil(n/2)) and [floor(n/2), n): what adaptive pooling does for an output of two.
    return draft.add("pool", "avg_pool2d", x, kernel=(side + 1) // 2, stride=side // 2)


BACKBONES: dict[str, Callable[..., Plan]] = {"fcn3": fcn3, "resnet18": resnet18}
