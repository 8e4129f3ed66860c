"""Run tokens through the experts that a router chose for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def run_experts(
    h: Tensor, experts: Tensor, count: int, run: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return what each token's experts make of it, slot by slot: `[N, k, hidden]`.

    Args:
        h: `[N, hidden]`.
        experts: `[N, k]` expert ids.
        count: number of experts; all are run, so that an unused one has a zero gradient.
        run: (expert, its tokens `[n, hidden]`, their places among the N * k pairs `[n]`) -> `[n, hidden]`.
    """
    slots = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # the N*k (token, slot) pairs, sorted by expert
    sizes: list[int] = torch.bincount(experts.flatten(), minlength=count).tolist()
    inputs = zip(torch.split(h[order // slots], sizes), torch.split(order, sizes), strict=True)
    outputs = torch.cat([run(expert, x, pairs) for expert, (x, pairs) in enumerate(inputs)])
    return torch.unflatten(outputs[order.argsort()], 0, (-1, slots))
