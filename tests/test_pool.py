"""The worker pool itself: values, failures, hangs, and that nothing is left behind for the next call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import pool
import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def identify() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def sum_of_ranks(scale: float) -> torch.Tensor:
    value = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return value


def fail_on_rank(rank: int) -> str:
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError(f"rank {rank} says no")
    return "fine"


def fail_on_rank_zero_alone(own_group: bool) -> None:
    group = dist.new_group() if own_group else None
    if dist.get_rank() == 0:
        raise ValueError("rank zero leaves")
    dist.barrier(group)


def fail_everywhere_after_talking() -> None:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    raise KeyError(tuple(gathered))


def fail_unpicklably() -> None:
    raise Unpicklable(1, 2)


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


def hang_on_rank(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(1)


def die_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sum_on_mesh(shape: tuple[int, ...]) -> float:
    mesh = init_device_mesh("cpu", shape)
    tensor = distribute_tensor(torch.arange(8.0), mesh)
    return float((tensor + tensor).sum().full_tensor())


def leave_groups_behind() -> None:
    dist.new_group()
    torch.rand(3)
    warnings.simplefilter("ignore")


def draw() -> tuple[float, bool, int]:
    return float(torch.rand(())), torch.is_grad_enabled(), torch.get_num_threads()


def warn() -> None:
    warnings.warn("do not do this", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_returns_its_value(ranks: Pool, world: int) -> None:
    answers = ranks.run(identify, world=world)
    assert [answer[:2] for answer in answers] == [(rank, world) for rank in range(world)]
    assert len({answer[2] for answer in answers} | {os.getpid()}) == world + 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_communicate_and_return_tensors(ranks: Pool, world: int) -> None:
    total = 0.5 * world * (world + 1) / 2
    assert [value.item() for value in ranks.run(sum_of_ranks, 0.5, world=world)] == [total] * world


def test_workers_are_reused(ranks: Pool) -> None:
    first = ranks.run(identify)
    assert ranks.run(identify) == first


def test_error_on_one_rank_shows_every_rank_and_what_it_printed(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(fail_on_rank, 1)
    text = str(caught.value)
    assert text.startswith("fail_on_rank failed; world size 2\n--- rank 0: returned a value\n--- rank 1: Tra")
    assert "ValueError: rank 1 says no\n--- rank 1 printed:\nabout to fail" in text
    assert ranks.run(fail_on_rank, 3) == ["fine", "fine"]


@pytest.mark.parametrize("own_group", [False, True])
def test_rank_that_waits_for_a_failed_one_is_let_go(ranks: Pool, own_group: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0: .*rank zero leaves.*rank 1: .*Connection closed"):
        ranks.run(fail_on_rank_zero_alone, own_group)
    assert time.monotonic() - start < pool.COLLECTIVE_TIMEOUT.total_seconds() / 2


def test_outcomes_returns_the_value_or_the_error_of_each_rank(ranks: Pool) -> None:
    value, error = ranks.outcomes(fail_on_rank, 1)
    assert value == "fine"
    assert isinstance(error, ValueError)
    assert str(error) == "rank 1 says no"
    assert "in fail_on_rank" in error.__notes__[0]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_outcomes_of_an_error_on_every_rank(ranks: Pool, world: int) -> None:
    errors = ranks.outcomes(fail_everywhere_after_talking, world=world)
    assert [type(error) for error in errors] == [KeyError] * world
    assert [error.args[0] for error in errors] == [tuple(range(world))] * world


def test_error_that_does_not_pickle_becomes_a_runtime_error_with_its_text(ranks: Pool) -> None:
    for error in ranks.outcomes(fail_unpicklably):
        assert type(error) is RuntimeError
        assert str(error) == "Unpicklable: 1 and 2"


def test_value_that_does_not_pickle_is_an_error(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"return_a_lambda.*<lambda>"):
        ranks.run(return_a_lambda)


def test_function_that_does_not_pickle_is_refused_before_any_rank_runs(ranks: Pool) -> None:
    before = ranks.run(identify)
    with pytest.raises(Exception, match="<lambda>"):
        ranks.run(lambda: None)
    assert ranks.run(identify) == before


def test_hang_is_ended_and_the_pool_works_afterwards(ranks: Pool) -> None:
    before = ranks.run(identify)
    with pytest.raises(RankError) as caught:
        ranks.run(hang_on_rank, 1, timeout=1)
    text = str(caught.value)
    assert "--- rank 0: returned a value\n--- rank 1: gave no answer and was ended" in text
    assert "in hang_on_rank" in text, "a hung rank shows where it stands"
    after = ranks.run(identify)
    assert [answer[:2] for answer in after] == [(0, 2), (1, 2)]
    assert not {answer[2] for answer in before} & {answer[2] for answer in after}


def test_death_of_a_worker_is_reported_and_the_pool_works_afterwards(ranks: Pool) -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        ranks.run(die_on_rank, 1)
    assert [answer[:2] for answer in ranks.run(identify)] == [(0, 2), (1, 2)]


def test_nothing_leaks_into_the_next_call(ranks: Pool) -> None:
    first = ranks.run(draw)
    ranks.run(leave_groups_behind)
    assert ranks.run(draw) == first
    assert first[0] == first[1] == (first[0][0], True, 1)
    with pytest.raises(RankError, match="DeprecationWarning: do not do this"):
        ranks.run(warn)


def test_meshes_of_one_shape_get_new_groups_in_each_call(ranks: Pool) -> None:
    for shape in [(2, 2), (4,), (2, 2), (4,)]:
        assert ranks.run(sum_on_mesh, shape, world=4) == [56.0] * 4


def test_warnings_are_errors_in_the_test_process_and_in_the_workers(ranks: Pool) -> None:
    with pytest.raises(DeprecationWarning, match="do not do this"):
        warn()
    for error in ranks.outcomes(warn):
        assert isinstance(error, DeprecationWarning)


def test_fake_world_has_the_size_asked_for(fake_world: Callable[..., None]) -> None:
    fake_world(64)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 64)
    assert init_device_mesh("cpu", (8, 8)).shape == (8, 8)


def test_fake_world_is_gone_after_the_test(fake_world: Callable[..., None]) -> None:
    assert not dist.is_initialized()
    fake_world(4, rank=3)
    assert dist.get_rank() == 3
