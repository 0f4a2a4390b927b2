"""The networks of `experiments.speed` in PyTorch, non-private and by Opacus: a process of its own.

Needs torch and opacus, and no JAX. One argument, a JSON object: model, repeats, budget, smoke. The
last line on standard output is the result as JSON, as `experiments.speed` stores it.
"""

import functools
import json
import math
import os
import sys
import warnings
from typing import Any

import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (  # pyright: ignore
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.optimizers.optimizer_fast_gradient_clipping import (  # pyright: ignore
    DPOptimizerFastGradientClipping,
)
from opacus.utils.fast_gradient_clipping_utils import (  # pyright: ignore[reportMissingImports]
    DPLossFastGradientClipping,
)
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments._timing import median, race

WIDTH, HEADS, POSITIONS, VOCABULARY, LORA_RANK = 128, 4, 64, 8_192, 8  # as in _speed_models


class Pool(nn.Module):
    """2x2 max-pool of stride 1, by `maximum`, as in `models.MnistCNN`."""

    def forward(self, x):
        """(batch, channels, height, width) in and out."""
        x = torch.maximum(x[:, :, 1:], x[:, :, :-1])
        return torch.maximum(x[:, :, :, 1:], x[:, :, :, :-1])


class Residual(nn.Module):
    """A block of ResNet20 without affine norms."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.stride, self.more = stride, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(4, after, affine=False)

    def forward(self, x):
        """(batch, channels, height, width) in and out."""
        y = self.norm(self.conv2(torch.relu(self.norm(self.conv1(x)))))
        if self.stride > 1:
            x = functional.pad(functional.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.more))
        return torch.relu(x + y)


class Adapted(nn.Module):
    """A frozen dense layer and its low-rank addition."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, WIDTH, bias=False)

    def forward(self, x):
        """(batch, positions, width) in and out."""
        return self.base(x) + self.up(self.down(x))


class TransformerBlock(nn.Module):
    """Attention and two dense layers, each after a norm."""

    def __init__(self, lora: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = (Adapted() if lora else nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.key, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """(batch, positions, width) in and out."""
        y = self.norm1(x)
        queries, keys, values = (
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = queries @ keys.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        mixed = (torch.softmax(scores, -1) @ values).transpose(1, 2).flatten(2)
        x = x + self.mix(mixed)
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Two blocks, a norm, the mean over positions, ten logits; `words` puts an embedding before."""

    def __init__(self, words: bool = False, lora: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if words else nn.Identity()
        self.place = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.Sequential(TransformerBlock(lora), TransformerBlock(lora))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        if lora:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = ".down." in name or ".up." in name

    def forward(self, x):
        """(batch, positions[, width]) to (batch, 10)."""
        places = torch.arange(POSITIONS).repeat(len(x), 1)
        return self.output(self.norm(self.blocks(self.embedding(x) + self.place(places))).mean(1))


def _mlp(*widths: int):
    layers = [nn.Linear(*sizes) for sizes in zip(widths, widths[1:], strict=False)]
    pairs = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*pairs[:-1])


def _cnn():
    return nn.Sequential(
        nn.ZeroPad2d(3),
        *(nn.Conv2d(1, 16, 8, 2), nn.Tanh(), Pool(), nn.Conv2d(16, 32, 4, 2), nn.Tanh(), Pool()),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def _resnet20():
    norm = nn.GroupNorm(4, 16, affine=False)
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm, nn.ReLU()]
    before = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            layers.append(Residual(before, width, 2 if stage and not block else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def network(name: str, smoke: bool) -> tuple[str, Any, Any]:
    """Return (title, function that makes the network, inputs)."""
    big, small = (8, 8) if smoke else (256, 64)
    widths = (16, 8, 8, 10) if smoke else (784, 512, 512, 10)
    features = torch.randn(small, POSITIONS, WIDTH)
    words = torch.randint(0, VOCABULARY, (small, POSITIONS))
    return {
        "mlp": ("MLP", functools.partial(_mlp, *widths), torch.randn(big, widths[0])),
        "cnn": ("MNIST CNN", _cnn, torch.randn(big, 1, 28, 28)),
        "transformer": ("transformer", Transformer, features),
        "text": ("text", functools.partial(Transformer, words=True), words),
        "lora": ("LoRA", functools.partial(Transformer, lora=True), features),
        "resnet20": ("ResNet20", _resnet20, torch.randn(small, 3, 32, 32)),
    }[name]


def step_of(mode: str, make: Any, x: Any, y: Any) -> Any:
    """Return a function that takes one step: non-private, or by Opacus in one of two modes."""
    torch.manual_seed(0)
    model, n = make(), len(y)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    criterion = nn.CrossEntropyLoss()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": n}
    optimizer, loss_of = sgd, criterion
    if mode == "hooks":
        model = opacus.GradSampleModule(model)
        optimizer = DPOptimizer(sgd, **options)
    elif mode == "ghost":
        model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(sgd, **options)
        loss_of = DPLossFastGradientClipping(model, optimizer, criterion)

    def step():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def main() -> dict[str, Any]:
    """Time one network."""
    options = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    title, make, x = network(options["model"], options["smoke"])
    y = torch.randint(0, 10, (len(x),))
    steps, left_out = {}, {}
    for mode in ("non-private", "hooks", "ghost"):
        step = step_of(mode, make, x, y)
        try:
            step()
        except (NotImplementedError, RuntimeError, ValueError, AttributeError) as error:
            left_out[mode] = str(error).splitlines()[0]
        else:
            steps[mode] = step
    times = race(steps, options["repeats"], options["budget"])
    return {
        "title": title,
        "versions": {"torch": torch.__version__, "opacus": opacus.__version__},
        "left_out": left_out,
        "contestants": {
            name: {"times": own, "seconds": median(own)} for name, own in times.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(main()))
