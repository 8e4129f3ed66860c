"""The corpus and its batches: pure functions of seed, step and sizes, split over ranks without remainder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from annotate_fsdp.train.batches import rank_rows
from annotate_fsdp.train.data import Corpus, Text, is_held_out, list_sources, load_corpus, window_starts
from annotate_fsdp.train.settings import UsageError

SMALL = Corpus(train=torch.arange(200, dtype=torch.uint8), held_out=torch.arange(100, dtype=torch.uint8))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_corpus_is_python_source_some_of_it_held_out(corpus: Corpus) -> None:
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
    assert len(corpus.train) > 3_000_000
    assert 100_000 < len(corpus.held_out) < len(corpus.train) / 5
    assert b"def " in bytes(corpus.held_out[:20_000].tolist())


def test_corpus_is_the_same_each_time(corpus: Corpus) -> None:
    again = load_corpus()
    assert torch.equal(again.train, corpus.train)
    assert torch.equal(again.held_out, corpus.held_out)


def test_corpus_takes_no_installed_package_and_nothing_of_one_build(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a.py",
        "_sysconfigdata_x.py",
        "json/z.py",
        "site-packages/c.py",
        "test/d.py",
        "e.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list_sources(tmp_path) == ["a.py", "b.py", "json/z.py"]


def test_held_out_files_depend_on_their_names_alone() -> None:
    names = [f"module_{index}.py" for index in range(64)]
    assert [name for name in names if is_held_out(name)] == ["module_20.py", "module_42.py", "module_52.py"]


def test_corpus_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_corpus(tmp_path)
    assert str(error.value) == f"there are not enough Python sources below {tmp_path} to train on"


@given(share=st.integers(1, 8), ranks=st.integers(1, 8))
def test_rows_of_the_ranks_partition_the_global_batch(share: int, ranks: int) -> None:
    batch = share * ranks
    rows = [rank_rows(batch, rank, ranks) for rank in range(ranks)]
    assert [row for mine in rows for row in mine] == list(range(batch))
    assert {len(mine) for mine in rows} == {share}


@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4]),
    length=st.integers(1, 199),
)
def test_batches_of_the_ranks_are_the_global_batch_whatever_their_number(
    seed: int, step: int, ranks: int, length: int
) -> None:
    text = Text(SMALL, length)
    whole = text.train(seed, step, range(8))
    parts = [text.train(seed, step, rank_rows(8, rank, ranks)) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert whole.inputs.shape == whole.targets.shape == (8, length)
    assert torch.equal(
        whole.targets, whole.inputs + 1
    )  # the text counts upwards, and the target is the next byte


def test_starts_of_windows_are_what_they_always_were() -> None:
    assert window_starts(10**6, 0, 0, range(3), 128) == [211461, 818854, 951025]
    assert window_starts(10**6, 0, 1, range(3), 128) != window_starts(10**6, 0, 0, range(3), 128)
    assert window_starts(10**6, 1, 0, range(3), 128) != window_starts(10**6, 0, 0, range(3), 128)


def test_starts_of_windows_reach_both_ends_of_the_text() -> None:
    starts = {window_starts(132, 0, step, [0], 128)[0] for step in range(200)}
    assert starts == {0, 1, 2, 3}


def test_held_out_windows_are_spread_over_all_held_out_bytes() -> None:
    text = Text(SMALL, 10)
    batch = text.held_out(range(text.held_out_rows))
    assert batch.inputs[0, 0] == 0
    assert int(batch.inputs[:, 0].max()) > 80
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_batch_that_ranks_cannot_share_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as error:
        rank_rows(6, 0, 4)
    assert str(error.value) == "a global batch of 6 rows cannot be split evenly over 4 ranks"


def test_sequence_longer_than_the_text_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as error:
        Text(SMALL, 200).train(0, 0, range(1))
    assert str(error.value) == "--sequence-length 200 is longer than the text; write at most 199"
