"""The contenders of PyTorch: DDP over gloo, with and without its communication hooks."""

from __future__ import annotations

import itertools
import json
import os

import torch
import turns
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

POWER_SGD_RANK = 4


def join(plan: turns.Plan) -> turns.Job:
    """Connects this worker to the other workers."""
    config = json.loads(os.environ["TF_CONFIG"])
    rank, addresses = config["task"]["index"], config["cluster"]["worker"]
    os.environ["GLOO_SOCKET_IFNAME"] = plan.network.interface
    distributed.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    work = exchange if plan.job == turns.EXCHANGE else training
    return turns.Job(
        rank,
        mean_over_workers,
        lambda name: work(name, rank),
        leave=distributed.destroy_process_group,
    )


def mean_over_workers(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def data_parallel(name: str, model: nn.Module) -> nn.parallel.DistributedDataParallel:
    # PowerSGD's hook handles several buckets at once. With gloo, their order may differ between
    # ranks, which ends the job, so PowerSGD gets one bucket.
    bucket_mb = 1000 if name == turns.TORCH_POWER_SGD else 25
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if name == turns.TORCH_FLOAT16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == turns.TORCH_POWER_SGD:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def contender(name: str, step, model: nn.Module, prepare=None) -> turns.Contender:
    """Makes a contender; PowerSGD's first steps are dense, and belong to the warm-up."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    sent = {turns.TORCH_ALL_REDUCE: 4, turns.TORCH_FLOAT16: 2}
    workers = distributed.get_world_size()
    step_bytes = None
    if name in sent:
        step_bytes = 2 * (workers - 1) / workers * sent[name] * elements
    return turns.Contender(step, prepare, step_bytes=step_bytes, keeps_residual=name not in sent)


def training(name: str, rank: int) -> turns.Contender:
    """Makes a contender that trains the MLP."""
    sizes = itertools.pairwise(turns.MLP_LAYERS)
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    model = data_parallel(name, nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), turns.LEARNING_RATE, turns.MOMENTUM)
    arrays = turns.images(turns.MLP, (turns.MLP_LAYERS[0],), rank)
    batches = itertools.cycle(zip(*map(torch.from_numpy, arrays), strict=True))

    def step() -> None:
        inputs, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return contender(name, step, model)


class GivenGradients(torch.autograd.Function):
    """A loss with given gradients, at no cost."""

    @staticmethod
    def forward(ctx, gradients, *parameters):
        """Returns zero."""
        ctx.given = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _gradient):
        """Returns the given gradients; a second reference to them would cause a copy."""
        gradients = [ctx.given.pop(0) for _ in range(len(ctx.given))]
        return None, *gradients


class ExchangedModel(nn.Module):
    """Parameters of given shapes with random gradients."""

    def __init__(self, shapes, rank):
        super().__init__()
        # TensorFlow has a matrix's outputs last, PyTorch first.
        self.weights = nn.ParameterList(torch.zeros(*reversed(shape)) for shape in shapes)
        random = torch.Generator().manual_seed(rank)
        elements = sum(weight.numel() for weight in self.weights)
        self._noise = 0.3 * torch.randn(elements + turns.NOISE_PLACES, generator=random)
        self._means = [0.02 * torch.randn(weight.shape) for weight in self.weights]
        self.given = []

    def draw(self) -> None:
        """Makes the gradients of the next step, as models.py does."""
        offset = int(torch.randint(turns.NOISE_PLACES, []))
        self.given = []
        for mean in self._means:
            noise = self._noise[offset : offset + mean.numel()].reshape(mean.shape)
            self.given.append(mean + noise)
            offset += mean.numel()

    def forward(self):
        """Returns the loss."""
        return GivenGradients.apply(self.given, *self.weights)


def exchange(name: str, rank: int) -> turns.Contender:
    """Makes a contender that only exchanges the gradient of a ResNet-50."""
    inner = ExchangedModel(turns.resnet50_shapes(), rank)
    model = data_parallel(name, inner)

    def prepare() -> None:
        model.zero_grad()
        inner.draw()

    return contender(name, lambda: model().backward(), model, prepare)


if __name__ == "__main__":
    turns.measure(join)
