"""Other people's networks: planned exactly, learned, bundled and exported; or refused with the layer's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import make_tasks
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy import Learning, Predictor, Preprocessing, learn_sequence, load_bundle, mask_network
from etcl_deploy.bundle.bundle import save
from etcl_deploy.config import Config, Transfer
from etcl_deploy.errors import NetworkError
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_multitask import export_multitask
from etcl_deploy.export.to_onnx import OnnxOptions, export_task
from etcl_deploy.learn.trainer import predict
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs import store
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.to_bundle import bundle_of

IMAGE = (1, 16, 16)


class Inverted(nn.Module):
    """MobileNet's block: 1x1, depthwise 3x3, 1x1, and a shortcut where shapes allow."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class Mobile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.Hardswish())
        self.blocks = nn.Sequential(Inverted(6, 6, 1), Inverted(6, 8, 2), nn.Identity())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class ResidualGroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding="same")
        self.norm1 = nn.GroupNorm(4, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False)
        self.norm2 = nn.InstanceNorm2d(8, affine=True)
        self.down = nn.Conv2d(8, 6, 1, stride=(2, 1))
        self.pool = nn.AdaptiveAvgPool2d((2, 4))

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        x = F.silu(self.norm1(self.stem(x)))
        x = torch.add(x, self.norm2(self.conv(x)).sigmoid())
        x = torch.cat([self.down(x), F.leaky_relu(self.down_again(x), 0.2)], dim=1)
        return self.pool(x).view(x.size(0), -1) if scale is None else x

    def down_again(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.elu(x, 0.5), (3, 1), stride=(2, 1), padding=(1, 0))


class LayerNormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.LayerNorm((1, 16, 16))  # a name that containers of torch use for themselves
        self.first = nn.Linear(256, 24)
        self.norm = nn.LayerNorm(24, eps=1e-3)
        self.second = nn.Linear(24, 24, bias=False)
        self.batch = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(torch.flatten(self.values(x), 1))))
        x = x + F.dropout(self.batch(self.second(x)).tanh(), 0.1, self.training)
        return F.log_softmax(self.head(x), dim=1)


def biased_vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(16, 3),
    )


def oblong() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, (5, 1), stride=(2, 1), padding=(2, 0)),
        nn.GELU(),
        nn.Conv2d(4, 6, (1, 5), stride=(1, 3), padding=(0, 2), dilation=(1, 2)),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d((2, 1)),
        nn.Flatten(),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobile": Mobile,
    "group_norm": ResidualGroupNorm,
    "layer_norm": LayerNormMlp,
    "vgg": biased_vgg,
    "oblong": oblong,
}


def features_of(module: nn.Module, images: Tensor) -> Tensor:
    """The input of the module's last Linear; the module's result if it has none."""
    seen: list[Tensor] = []
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    hook = linear[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0])) if linear else None
    result = module.eval()(images)
    if hook:
        hook.remove()
    return seen[-1] if seen else result


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planned_network_computes_what_the_module_does(name: str) -> None:
    """With every weight selected the features are the module's own; the module itself is left as it was."""
    torch.manual_seed(0)
    module = NETWORKS[name]()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    network = mask_network(module, IMAGE, density=1.0).eval()
    assert module.training and all(torch.equal(before[key], v) for key, v in module.state_dict().items())
    for layer in network.masked_layers.values():
        layer.mask = torch.ones_like(layer.weight, dtype=torch.bool)
    pixels = torch.randint(0, 256, (9, 16, 16, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        images = Preprocessing(16, 16, 1).normalize(pixels).clone(memory_format=torch.contiguous_format)
        expected = features_of(module, images)
        torch.testing.assert_close(network.features(pixels), expected, rtol=1e-5, atol=1e-5)
    assert float(expected.std()) > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_learned_bundled_and_exported_it_answers_the_same(name: str, tmp_path: Path) -> None:
    """Two tasks: network, Predictor and ONNX agree on every class, and task 1 keeps its bits."""
    torch.manual_seed(0)
    check_everywhere(mask_network(NETWORKS[name](), IMAGE, density=0.6), tmp_path)


@pytest.mark.parametrize(("backbone", "width"), [("lenet5", 4), ("alexnet", 2)])
def test_the_papers_other_networks_answer_the_same(backbone: str, width: int, tmp_path: Path) -> None:
    """LeNet-5 and AlexNet, narrow, on images large enough for both."""
    values = {"backbone": backbone, "size": 24, "channels": 1, "width": width}
    check_everywhere(build_network(Config().with_values(values)), tmp_path, size=24)


def check_everywhere(network: MaskedNetwork, directory: Path, size: int = 16) -> None:
    tasks = make_tasks(2, size=size)
    options = Learning(epochs=1, batch_size=16, learning_rate=0.01, transfer=Transfer(backward="off"))
    run = learn_sequence(network, tasks[:1], options)
    first = predict(network, "t0", tasks[0].test_x)
    run = learn_sequence(network, tasks[1:], options, before=run, earlier=tasks[:1])
    assert torch.equal(predict(network, "t0", tasks[0].test_x), first)
    store.save(store.StoredRun(run, Config(), ()), directory / "run")
    restored = store.load_run(directory / "run").run
    assert torch.equal(predict(restored.network, "t0", tasks[0].test_x), first)
    save(directory / "b.etcl", bundle_of(network, "mine", {}, {}).to_bytes("coded"))
    bundle = load_bundle(directory / "b.etcl")
    assert not bundle.plan.dropouts
    predictor = Predictor(bundle)
    for task in tasks:
        expected = predict(network, task.name, task.train_x)
        assert len(expected.unique(dim=0)) > 20, "different items get different answers"
        answers = predictor.predict(list(task.train_x), [task.name] * len(expected))
        scores = np.array([list(answer.scores.values()) for answer in answers])
        np.testing.assert_allclose(scores, expected.softmax(1).numpy(), atol=1e-5)
        export_task(bundle, task.name, directory / "t.onnx", task.train_x)
        exported, _ = session(directory / "t.onnx").run(None, {"image": task.train_x.numpy()})
        np.testing.assert_allclose(exported, scores, atol=1e-5)
        assert (exported.argmax(1) == expected.argmax(1).numpy()).all()
        export_task(bundle, task.name, directory / "t.onnx", task.train_x, OnnxOptions(compact=True))
    whole = export_multitask(bundle, directory / "all.onnx")
    assert whole.parity.same_class == whole.parity.items == 16


def test_weights_are_the_modules_and_heads_are_not() -> None:
    """Masked layers start from the module's weights; a bias is a masked step of its own; the last Linear is dropped."""
    module = biased_vgg()
    network = mask_network(module, IMAGE)
    assert list(network.masked_layers) == ["0", "0_bias", "3", "3_bias", "8", "8_bias"]
    assert torch.equal(network.masked_layers["3"].weight, module[3].weight)
    assert torch.equal(network.masked_layers["3_bias"].weight, module[3].bias)
    assert network.plan.head_bias
    assert not mask_network(LayerNormMlp(), IMAGE).plan.head_bias
    assert network.plan.steps[-1].op == "dropout"


class Calls(nn.Module):
    """One convolution, then whatever `then` does."""

    def __init__(self, then: Callable[[Tensor], object], **layers: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1))
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.then = then

    def forward(self, x: Tensor) -> object:
        x = self.conv(x)
        for name, layer in self.named_children():
            if name not in ("conv", "again"):
                x = layer(x)
        if hasattr(self, "again"):
            x = self.again(self.again(x))
        return self.then(x)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


class Scaled(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return flat(self.conv(x) + self.scale)


class Double(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def in_place_shortcut(x: Tensor) -> Tensor:
    return flat(x + F.relu(x, inplace=True))


REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("lstm", lambda: Calls(flat, rnn=nn.LSTM(16, 4)), r"layer 'rnn' \(LSTM\) cannot be masked; known: Conv2d, Linear"),
    ("transposed", lambda: Calls(flat, up=nn.ConvTranspose2d(4, 4, 2)), r"'up' \(ConvTranspose2d\) cannot be masked"),
    ("padding_mode", lambda: Calls(flat, c=nn.Conv2d(4, 4, 3, 1, 1, padding_mode="reflect")), r"'c' .*padding_mode"),
    ("same", lambda: Calls(flat, c=nn.Conv2d(4, 4, 2, padding="same")), r"'c' \(Conv2d\) .*one side more"),
    ("twice", lambda: Calls(flat, again=nn.Conv2d(4, 4, 1)), r"'again' \(Conv2d\) cannot be masked: it is used twice"),
    ("norm twice", lambda: Calls(flat, again=nn.BatchNorm2d(4)), r"'again' \(BatchNorm2d\) .*used twice"),
    ("ceil", lambda: Calls(flat, pool=nn.MaxPool2d(3, ceil_mode=True)), r"'pool' \(MaxPool2d\) .*ceil_mode"),
    ("uneven", lambda: Calls(flat, pool=nn.AdaptiveAvgPool2d(7)), r"'pool' .*16 pixels do not divide into 7"),
    ("last axis", lambda: Calls(flat, norm=nn.LayerNorm(16)), r"'norm' \(LayerNorm\) .*only the whole item"),
    ("dropout", lambda: Calls(flat, drop=nn.Dropout(0.125)), r"'drop' \(Dropout\) .*whole percent"),
    ("channels", lambda: Calls(flat, drop=nn.Dropout2d()), r"'drop' \(Dropout2d\) cannot be masked; known"),
    ("tanh gelu", lambda: Calls(flat, act=nn.GELU("tanh")), r"'act' \(GELU\) .*only the exact"),
    ("parameter", lambda: Scaled(flat), r"'scale' \(a tensor used directly\) cannot be masked"),
    ("control", lambda: Calls(lambda x: flat(x) if x.sum() > 0 else x), "Calls cannot be traced: .*control flow"),
    ("tuple", lambda: Calls(lambda x: (flat(x), x)), "gives a tuple; it must give one tensor"),
    ("map", lambda: Calls(lambda x: x), "must give a flat vector"),
    ("constant", lambda: Calls(lambda x: flat(x + 1)), r"'add' \(add\) .*constant"),
    ("product", lambda: Calls(lambda x: flat(x * x)), r"'mul' \(mul\) cannot be masked; known"),
    ("broadcast", lambda: Calls(lambda x: flat(x + x.mean((2, 3), keepdim=True))), r"'add' \(add\) .*equal shapes"),
    ("rows", lambda: Calls(lambda x: x.view(x.size(0), 4, -1)), r"'view' \(view\) .*only flattening"),
    ("items", lambda: Calls(lambda x: torch.cat([x, x], 0)), r"'cat' \(cat\) .*only channels"),
    ("in place", lambda: Calls(in_place_shortcut), "taken one by one, do not give what it gives"),
    ("head only", lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), "no layer to mask"),
    ("misfit", lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), r"'1' \(Linear\) fails on these images"),
    ("two inputs", Double, "takes x, y; it must take a batch of images"),
    ("half", lambda: Calls(flat).half(), "weights of torch.float16"),
    ("computed", lambda: Calls(flat, c=weight_norm(nn.Conv2d(4, 4, 1))), r"'c' .*computed"),
]


def weight_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


@pytest.mark.parametrize(("make", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_masked_is_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    """One error that names the layer and its kind, or says what is wrong with the whole."""
    with pytest.raises(NetworkError, match=reason):
        mask_network(make(), IMAGE)


def test_the_preprocessing_must_fit_the_image() -> None:
    """Otherwise the first batch would fail."""
    with pytest.raises(NetworkError, match="the preprocessing gives"):
        mask_network(biased_vgg(), IMAGE, preprocessing=Preprocessing(8, 8, 1))
    with pytest.raises(NetworkError, match="channels must be 1"):
        mask_network(nn.Sequential(nn.Conv2d(5, 4, 1), nn.Flatten()), (5, 8, 8))
