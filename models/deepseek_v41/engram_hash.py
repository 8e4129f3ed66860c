"""Which rows of each engram table a token looks up: hashes of the last 2, ..., N tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.primes import ngram_primes

SEED = 10007


class DeepseekV41EngramHash(nn.Module):
    """Hash token n-grams for every engram layer; it holds int64 buffers only, none in a state dict.

    - token_map `[tokens]`: the class of each token id, such that spellings of one word share one. Its
      making belongs to the tokenizer. None maps each id to itself, which is right if the vocabulary is the
      compressed one.
    - primes, offsets `[L, heads]`; multipliers `[L, N]`; of the engram layers.

    Raises:
        ValueError: a map that does not fit the configuration, or none where one is needed.
    """

    token_map: Tensor
    primes: Tensor
    offsets: Tensor
    multipliers: Tensor

    def __init__(
        self, config: DeepseekV41TextConfig, token_map: Tensor | Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._given = None if token_map is None else checked_token_map(config, token_map)
        layers, heads = len(config.engram_layers), config.engram_heads
        size = config.vocab_size if self._given is None else len(self._given)
        for name, shape in (
            ("token_map", (size,)),
            ("primes", (layers, heads)),
            ("offsets", (layers, heads)),
            ("multipliers", (layers, config.engram_max_ngram_size)),
        ):
            self.register_buffer(name, torch.empty(shape, dtype=torch.int64), persistent=False)
        if not self.token_map.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the buffers; on `meta` there is nothing to fill."""
        self.token_map.copy_(self._token_map())
        primes, multipliers = hash_numbers(self.config)
        self.primes.copy_(primes)
        self.offsets.copy_(primes.cumsum(-1) - primes)
        self.multipliers.copy_(multipliers)

    def _token_map(self) -> Tensor:
        config = self.config
        if self._given is not None:
            return self._given
        if config.vocab_size != config.engram_compressed_vocab_size:
            raise ValueError(
                f"the engram of a vocabulary of {config.vocab_size} tokens hashes "
                f"{config.engram_compressed_vocab_size} classes, but no token_map says which; pass the "
                "tokenizer's map to DeepseekV41ForCausalLM(config, token_map=...)"
            )
        if config.engram_pad_token_id >= config.vocab_size:
            raise ValueError(
                f"engram_pad_token_id is {config.engram_pad_token_id}, beyond the vocabulary of "
                f"{config.vocab_size} tokens, and no token_map says its class"
            )
        return torch.arange(config.vocab_size)

    def forward(self, ids: Tensor, blocked: Tensor | None = None) -> Tensor:
        """Return the rows of every engram layer's table: int64 `[L, B, S, heads]`.

        A look back that crosses the start, or a blocked position, sees the pad token from there on. The
        heads of the 2-grams come first, those of the N-grams last.

        Args:
            ids: int64 `[B, S]`.
            blocked: bool `[B, S]`, True at image tokens and padding; None if there is none.
        """
        tokens = self.token_map[ids]
        pad = self.token_map[self.config.engram_pad_token_id]
        open_ = torch.ones_like(ids, dtype=torch.bool) if blocked is None else ~blocked
        seen = torch.ones_like(open_)
        multipliers = self.multipliers[:, :, None, None]  # [L, N, 1, 1]
        rolling = tokens * multipliers[:, 0]  # [L, B, S]
        hashes = []
        for shift in range(1, self.config.engram_max_ngram_size):
            seen = seen & shifted(open_, shift)
            token = torch.where(seen, shifted(tokens, shift), pad)
            rolling = rolling ^ (token * multipliers[:, shift])
            hashes.append(rolling)
        grams = torch.stack(hashes, dim=-1).repeat_interleave(self.config.engram_n_heads, dim=-1)
        return grams % self.primes[:, None, None] + self.offsets[:, None, None]


def shifted(x: Tensor, shift: int) -> Tensor:
    """Return `x` `[B, S]` moved `shift` places to the right, with zeros, or False, at the start."""
    return F.pad(x, (shift, 0))[:, : x.shape[1]]


def hash_numbers(config: DeepseekV41TextConfig) -> tuple[Tensor, Tensor]:
    """Return the prime moduli `[L, heads]` and odd multipliers `[L, N]` of the engram layers, int64.

    The multipliers are drawn by numpy's default generator, seeded with 10007 * layer, below a bound that
    keeps every product of a token class and a multiplier within int64.
    """
    layers = config.engram_layers
    primes = ngram_primes(len(config.engram_layer_ids), config.engram_heads, config.engram_vocab_size)
    bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
    drawn = [
        np.random.default_rng(SEED * layer).integers(0, bound, size=config.engram_max_ngram_size) * 2 + 1
        for layer in layers
    ]
    return torch.tensor(primes[: len(layers)]), torch.from_numpy(np.stack(drawn))


def checked_token_map(config: DeepseekV41TextConfig, token_map: Tensor | Sequence[int]) -> Tensor:
    """Return a map that the hashes can use, int64 on the CPU.

    Raises:
        ValueError: it says what is wrong.
    """
    classes = config.engram_compressed_vocab_size
    given = token_map if isinstance(token_map, Tensor) else torch.tensor(token_map, device="cpu")
    if given.is_meta:
        wrong = "it has no values"
    elif given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        wrong = "it must be a list of integers, one for each token id"
    elif len(given) < config.vocab_size:
        wrong = f"it has {len(given)} entries for a vocabulary of {config.vocab_size}"
    elif not (int(given.min()) >= 0 and int(given.max()) < classes):
        wrong = f"its values must lie in 0..{classes - 1} (engram_compressed_vocab_size)"
    elif config.engram_pad_token_id >= len(given):
        wrong = f"it has no entry for engram_pad_token_id, {config.engram_pad_token_id}"
    else:
        return given.to("cpu", torch.int64)
    raise ValueError(f"token_map: {wrong}")
