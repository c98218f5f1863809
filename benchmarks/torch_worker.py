"""One PyTorch worker of the network benchmark: DDP over gloo; `network.py` starts it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import jobs
import torch
import turns
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

POWER_SGD_RANK = 4


def main() -> None:
    plan = turns.Plan.from_command_line()
    config = json.loads(os.environ["TF_CONFIG"])
    rank, addresses = config["task"]["index"], config["cluster"]["worker"]
    os.environ["GLOO_SOCKET_IFNAME"] = plan.network.interface
    distributed.init_process_group(
        "gloo", f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    work = exchange if plan.job == jobs.EXCHANGE else training
    contenders = {name: work(name, plan, rank) for name in plan.contenders}
    records = turns.take_turns(plan, contenders, mean_over_workers, rank)
    if rank == 0:
        Path(plan.output).write_text(json.dumps(records))
    distributed.destroy_process_group()


def mean_over_workers(number: float) -> float:
    total = torch.tensor(number, dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def data_parallel(name: str, model: nn.Module) -> nn.parallel.DistributedDataParallel:
    # PowerSGD's hook talks of several buckets at once, in an order that gloo leaves to chance and
    # that may differ from rank to rank, which ends the job. So all goes into one bucket for it.
    bucket_mb = 1000 if name == jobs.TORCH_POWER_SGD else 25
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if name == jobs.TORCH_FLOAT16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == jobs.TORCH_POWER_SGD:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def contender(name: str, step, model: nn.Module, prepare=None) -> turns.Contender:
    """Its dense steps come first in the warm-up, where there is PowerSGD behind them."""
    elements = sum(parameter.numel() for parameter in model.parameters())
    sent = {jobs.TORCH_ALL_REDUCE: 4, jobs.TORCH_FLOAT16: 2}
    workers = distributed.get_world_size()
    step_bytes = None
    if name in sent:
        step_bytes = 2 * (workers - 1) / workers * sent[name] * elements
    return turns.Contender(step, prepare, step_bytes=step_bytes, keeps_residual=name not in sent)


def training(name: str, plan: turns.Plan, rank: int) -> turns.Contender:
    """Whole steps of training the MLP."""
    sizes = itertools.pairwise(jobs.MLP_LAYERS)
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    model = data_parallel(name, nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), jobs.LEARNING_RATE, jobs.MOMENTUM)
    arrays = jobs.images(jobs.MLP, (jobs.MLP_LAYERS[0],), rank)
    batches = itertools.cycle(zip(*map(torch.from_numpy, arrays), strict=True))

    def step() -> None:
        inputs, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return contender(name, step, model)


class GivenGradients(torch.autograd.Function):
    """A loss whose gradients are those given, at no cost."""

    @staticmethod
    def forward(ctx, given, *parameters):
        """Some number."""
        ctx.given = given
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _gradient):
        """What was given; nobody else may hold it, or it would be copied."""
        given = [ctx.given.pop(0) for _ in range(len(ctx.given))]
        return None, *given


class ExchangedModel(nn.Module):
    """Parameters of given shapes, whose gradients are drawn at random."""

    def __init__(self, shapes, rank):
        super().__init__()
        # TensorFlow has a matrix's outputs last, PyTorch first.
        self.weights = nn.ParameterList(torch.zeros(*reversed(shape)) for shape in shapes)
        random = torch.Generator().manual_seed(rank)
        elements = sum(weight.numel() for weight in self.weights)
        self._noise = 0.3 * torch.randn(elements + jobs.NOISE_PLACES, generator=random)
        self._means = [0.02 * torch.randn(weight.shape) for weight in self.weights]
        self.given = []

    def draw(self) -> None:
        """Makes the gradients of the next step, as gradients.py does."""
        place = int(torch.randint(jobs.NOISE_PLACES, []))
        self.given = []
        for mean in self._means:
            noise = self._noise[place : place + mean.numel()].reshape(mean.shape)
            self.given.append(mean + noise)
            place += mean.numel()

    def forward(self):
        """The loss."""
        return GivenGradients.apply(self.given, *self.weights)


def exchange(name: str, plan: turns.Plan, rank: int) -> turns.Contender:
    """The gradient of a ResNet-50 is exchanged, and nothing else done."""
    inner = ExchangedModel(jobs.resnet50_shapes(), rank)
    model = data_parallel(name, inner)

    def prepare() -> None:
        model.zero_grad()
        inner.draw()

    return contender(name, lambda: model().backward(), model, prepare)


if __name__ == "__main__":
    main()
