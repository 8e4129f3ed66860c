"""DeepSeek-V4.1 once more, as slowly as it can be said: one sequence, position, head, stream and expert at a
time, in fp64.

Only the cache's fake quantisation computes in fp32, since what it rounds to depends on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, TokenType

Array = NDArray[np.float64]
Weights = Callable[[str], Array]
#: The patches of an image, `[rows * columns, 3, p, p]`, with its rows and columns.
Image = tuple[torch.Tensor, int, int]

FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class State:
    """What a KV source leaves to the layers after it."""

    ratio: int
    keys: list[Array]
    is_valid: list[bool]
    index_keys: list[Array]
    candidates: list[list[int]] | None = None
    chosen: list[list[int]] = field(default_factory=list)


def norm(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / math.sqrt(float(np.mean(x * x)) + eps) * weight
    return scaled


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: Array) -> Array:
    return np.array([value * sigmoid(value) for value in x])


def gelu(x: Array) -> Array:
    return np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x])


def softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max())
    shares: Array = exponentials / exponentials.sum()
    return shares


# Rotary embedding


def frequencies(config: Any, is_compressed: bool) -> list[float]:
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if is_compressed else config.rope_theta
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    yarn = config.rope_scaling
    if not is_compressed or yarn is None:
        return plain

    def correction(beta: float) -> float:
        turns = yarn.original_max_position_embeddings / (beta * 2 * math.pi)
        return float(dim * math.log(turns) / (2 * math.log(theta)))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    stretched = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
        stretched.append(frequency / yarn.factor * ramp + frequency * (1 - ramp))
    return stretched


def rotated(x: Array, position: int, freqs: list[float], sign: int = 1) -> Array:
    """Turn the last channels of `x`, in adjacent pairs."""
    y = x.copy()
    start = len(x) - 2 * len(freqs)
    for i, frequency in enumerate(freqs):
        pair = complex(x[start + 2 * i], x[start + 2 * i + 1])
        angle = sign * position * frequency
        pair *= complex(math.cos(angle), math.sin(angle))
        y[start + 2 * i], y[start + 2 * i + 1] = pair.real, pair.imag
    return y


# Engram hashes


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def hash_primes(engrams: int, orders: int, heads: int, least: int) -> list[list[list[int]]]:
    """primes[engram][order - 2][head]"""
    used: set[int] = set()
    primes: list[list[list[int]]] = []
    for _ in range(engrams):
        primes.append([])
        for _ in range(orders):
            primes[-1].append([])
            candidate = least - 1
            while len(primes[-1][-1]) < heads:
                candidate += 1
                if candidate not in used and is_prime(candidate):
                    used.add(candidate)
                    primes[-1][-1].append(candidate)
    return primes


def hash_multipliers(config: Any, layer: int) -> list[int]:
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size)
    return [int(number) * 2 + 1 for number in drawn]


def hashed_rows(
    config: Any, layer: int, ids: Sequence[int], is_blocked: Sequence[bool], token_map: Sequence[int]
) -> list[list[int]]:
    """rows[position]: the table rows that the engram of `layer` reads, in the order of its input."""
    orders, heads, least = config.engram_max_ngram_size - 1, config.engram_n_heads, config.engram_vocab_size
    every = hash_primes(len(config.engram_layer_ids), orders, heads, least)
    primes = every[config.engram_layer_ids.index(layer)]
    multipliers = hash_multipliers(config, layer)
    rows: list[list[int]] = []
    for position in range(len(ids)):
        rows.append([])
        rolling, offset, is_over = 0, 0, False
        for shift in range(config.engram_max_ngram_size):
            at = position - shift
            is_over = is_over or at < 0 or is_blocked[at]
            token = token_map[config.engram_pad_token_id if is_over else ids[at]]
            product = token * multipliers[shift]
            assert 0 <= product < 2**63
            rolling ^= product
            if shift:
                for prime in primes[shift - 1]:
                    rows[-1].append(offset + rolling % prime)
                    offset += prime
    return rows


# Fake quantisation, in fp32


def power_of_two_above(x: np.float32) -> np.float32:
    mantissa, exponent = math.frexp(float(x))
    return np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))


def e4m3(x: np.float32) -> np.float32:
    """Four significant bits down to 2**-6, below it multiples of 2**-9; ties to even."""
    if x == 0:
        return x
    exponent = max(math.frexp(float(x))[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    rounded = round(float(x) / step) * step
    assert abs(rounded) <= 448
    return np.float32(rounded)


def e2m1(x: np.float32) -> np.float32:
    """The nearest of FP4_LEVELS; between two, the one whose index is even."""
    size = min(abs(float(x)), 6.0)
    best = min(range(8), key=lambda level: (abs(size - FP4_LEVELS[level]), level % 2))
    return np.float32(math.copysign(FP4_LEVELS[best], float(x)))


def scale_of(kind: str, biggest: np.float32) -> np.float32:
    if kind == "fp8":
        return power_of_two_above(max(biggest, np.float32(1e-4)) / np.float32(448))
    if kind == "mxfp4":
        return power_of_two_above(max(biggest, np.float32(6 * 2.0**-126)) / np.float32(6))
    return e4m3(max(biggest, np.float32(6 * 2.0**-9)) / np.float32(6))


#: A relative error that fp32 may have made where a value is rounded.
NEAR = 1e-6

BLOCKS = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}


def quantized(x: Array, kind: str) -> Array:
    y = x.astype(np.float32)
    rounding = e4m3 if kind == "fp8" else e2m1
    for start in range(0, len(y), BLOCKS[kind]):
        block = y[start : start + BLOCKS[kind]]
        scale = scale_of(kind, np.abs(block).max())
        block[:] = [rounding(value / scale) * scale for value in block]
    return y.astype(np.float64)


def is_near_boundary(x: Array, kind: str) -> bool:
    """Whether an error of NEAR, relative to the largest of a block, could come out far larger."""
    for start in range(0, len(x), BLOCKS[kind]):
        block = x[start : start + BLOCKS[kind]]
        error = NEAR * np.abs(block).max()
        less, more = (quantized(block + np.sign(block) * e, kind) for e in (-error, error))
        if (np.abs(more - less) > 100 * error).any():
            return True
    return False


class SlowModel:
    """The model with the parameters `state`, by their names; `token_map` is the engrams'.

    A call returns logits `[S, vocab]`, and leaves what was chosen in `keys`, `candidates` (by layer, then
    position: compressed keys) and `experts` (best first). `is_close_call` says whether any of this, or of the
    fake quantisation's roundings, was decided by less than fp32 can be relied upon.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        state: dict[str, torch.Tensor],
        token_map: Sequence[int] = (),
    ) -> None:
        self.config, self.vision = config.text_config, config.vision_config
        self.state = {name: tensor.double().numpy() for name, tensor in state.items()}
        self.token_map = token_map
        self.keys: dict[int, list[list[int]]] = {}
        self.candidates: dict[int, list[list[int]]] = {}
        self.experts: dict[int, list[list[int]]] = {}
        self.is_close_call = False

    def weights(self, prefix: str) -> Weights:
        return lambda name: self.state[f"{prefix}.{name}"]

    def __call__(
        self,
        ids: Sequence[int],
        is_valid: Sequence[bool] | None = None,
        types: Sequence[int] | None = None,
        images: Sequence[Image] = (),
    ) -> Array:
        config, w = self.config, self.weights("model")
        length, streams = len(ids), config.hc_mult
        is_valid = [True] * length if is_valid is None else is_valid
        types = [TokenType.TEXT] * length if types is None else types
        is_image = [kind != TokenType.TEXT for kind in types]
        features = [feature for image in images for feature in self.image_features(*image)]
        marker = {
            TokenType.START: "image_start",
            TokenType.NEWLINE: "image_newline",
            TokenType.END: "image_end",
        }
        xs: list[list[Array]] = []  # [position][stream]
        for token, kind in zip(ids, types, strict=True):
            if kind == TokenType.TEXT:
                x = w("embed_tokens.weight")[token]
            elif kind == TokenType.IMAGE:
                x = features.pop(0)
            else:
                x = w(marker[TokenType(kind)])
            xs.append([x] * streams)
        assert not features
        mixes = [np.array([1.0] + [0.0] * (streams - 1))] * length
        state: State | None = None
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            if layer in config.engram_layer_ids:
                is_blocked = [image or not valid for image, valid in zip(is_image, is_valid, strict=True)]
                rows = hashed_rows(config, layer, ids, is_blocked, self.token_map)
                for i in range(length):
                    if not is_blocked[i]:
                        xs[i] = self.with_engram(self.weights(f"{at}.engram"), xs[i], rows[i])
            hypers = [self.hyper(self.weights(f"{at}.attn_hc"), x) for x in xs]
            hs = [
                self.norm(collapsed(x, mix), self.state[f"{at}.attn_norm.weight"])
                for x, mix in zip(xs, mixes, strict=True)
            ]
            outs, state = self.attention(layer, hs, is_valid, state)
            xs = [expanded(out, x, hyper) for out, x, hyper in zip(outs, xs, hypers, strict=True)]
            mixes = [hyper[0] for hyper in hypers]
            hypers = [self.hyper(self.weights(f"{at}.ffn_hc"), x) for x in xs]
            hs = [
                self.norm(collapsed(x, mix), self.state[f"{at}.ffn_norm.weight"])
                for x, mix in zip(xs, mixes, strict=True)
            ]
            outs = self.feed_forward(layer, hs, is_valid, is_image)
            xs = [expanded(out, x, hyper) for out, x, hyper in zip(outs, xs, hypers, strict=True)]
            mixes = [hyper[0] for hyper in hypers]
        hs = [self.norm(collapsed(x, mix), w("norm.weight")) for x, mix in zip(xs, mixes, strict=True)]
        return np.stack([self.state["lm_head.weight"] @ h for h in hs])

    def norm(self, x: Array, weight: Array) -> Array:
        return norm(x, weight, self.config.rms_norm_eps)

    def with_engram(self, w: Weights, streams: list[Array], rows: list[int]) -> list[Array]:
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        read = w("wkv.weight") @ np.concatenate([w("embed.weight")[row] for row in rows])
        value = read[len(streams) * size :]
        after = []
        for stream, x in enumerate(streams):
            key = read[stream * size : (stream + 1) * size]
            g = float(np.sum(x * w("q_weight")[stream] * w("k_weight")[stream] * key))
            g /= math.sqrt(float(np.mean(x * x)) + eps) * math.sqrt(float(np.mean(key * key)) + eps)
            g /= math.sqrt(size)
            gate = sigmoid(float(np.sign(g)) * math.sqrt(max(abs(g), 1e-6)))
            after.append(x + gate * value)
        return after

    def hyper(self, w: Weights, streams: list[Array]) -> tuple[Array, Array, Array]:
        """(pre [s], post [s], comb [from, to])"""
        count, eps = len(streams), self.config.hc_eps
        flat = np.concatenate(streams)
        mix = w("fn") @ flat / math.sqrt(float(np.mean(flat * flat)) + self.config.rms_norm_eps)
        logits = []
        for i in range(len(mix)):
            scale = w("scale")[0 if i < count else 1 if i < 2 * count else 2]
            logits.append(w("base")[i] + mix[i] * scale)
        pre = np.array([sigmoid(logits[i]) + eps for i in range(count)])
        post = np.array([2 * sigmoid(logits[count + i]) for i in range(count)])
        comb = np.zeros((count, count))
        for i in range(count):
            start = (2 + i) * count
            comb[i] = softmax(np.array(logits[start : start + count])) + eps
        for iteration in range(self.config.hc_sinkhorn_iters):
            for i in range(count if iteration else 0):
                comb[i, :] /= comb[i, :].sum() + eps
            for j in range(count):
                comb[:, j] /= comb[:, j].sum() + eps
        return pre, post, comb

    def attention(
        self, layer: int, xs: list[Array], is_valid: Sequence[bool], state: State | None
    ) -> tuple[list[Array], State | None]:
        config, w = self.config, self.weights(f"model.layers.{layer}.attn")
        ratio, heads, dim = config.compress_ratios[layer], config.num_attention_heads, config.head_dim
        freqs = frequencies(config, ratio > 0)
        lows = [self.norm(w("wq_a.weight") @ x, w("q_norm.weight")) for x in xs]
        local = []
        for position, x in enumerate(xs):
            key = rotated(self.norm(w("wkv.weight") @ x, w("kv_norm.weight")), position, freqs)
            local.append(self.quantized(key, "fp8"))
        if layer in config.kv_source_layer_ids:
            state = self.compressed(w, xs, is_valid, ratio, freqs)
        if layer in config.index_source_layer_ids:
            assert state is not None
            self.index(layer, xs, lows, state, freqs)
        outs = []
        for i in range(len(xs)):
            if not is_valid[i]:
                outs.append(np.zeros(config.hidden_size))
                continue
            seen = [local[j] for j in range(i + 1) if j > i - config.sliding_window and is_valid[j]]
            if ratio:
                assert state is not None
                seen += [state.keys[j] for j in state.chosen[i]]
            queries = w("wq_b.weight") @ lows[i]
            read = []
            for head in range(heads):
                query = rotated(queries[head * dim : (head + 1) * dim], i, freqs)
                logits = [float(query @ key) / math.sqrt(dim) for key in seen]
                shares = softmax(np.array([*logits, w("sinks_param.weight")[head]]))
                out = np.zeros(dim)
                for share, key in zip(shares[:-1], seen, strict=True):
                    out = out + share * key
                read.append(rotated(out, i, freqs, sign=-1))
            flat = np.concatenate(read)
            groups, rank = config.o_groups, config.o_lora_rank
            size = heads * dim // groups
            inner = [
                w("wo_a.weight")[group * rank : (group + 1) * rank] @ flat[group * size : (group + 1) * size]
                for group in range(groups)
            ]
            outs.append(w("wo_b.weight") @ np.concatenate(inner))
        return outs, state

    def compressed(
        self, w: Weights, xs: list[Array], is_valid: Sequence[bool], ratio: int, freqs: list[float]
    ) -> State:
        state = State(ratio, [], [], [])
        for start in range(0, len(xs) - ratio + 1, ratio):
            group = xs[start : start + ratio]
            values = [w("compressor.wkv.weight") @ x for x in group]
            pooled = values[0]
            if ratio > 1:
                gates = [w("compressor.wgate.weight") @ x for x in group]
                pooled = np.zeros_like(values[0])
                for channel in range(len(pooled)):
                    shares = softmax(np.array([gate[channel] for gate in gates]))
                    pooled[channel] = sum(s * v[channel] for s, v in zip(shares, values, strict=True))
            plain = self.norm(pooled, w("compressor.norm.weight"))
            state.keys.append(self.quantized(rotated(plain, start, freqs), "nvfp4"))
            state.is_valid.append(all(is_valid[start : start + ratio]))
            index_key = self.norm(w("indexer.wk.weight") @ plain, w("indexer.k_norm.weight"))
            state.index_keys.append(self.quantized(rotated(index_key, start, freqs), "mxfp4"))
        return state

    def index(self, layer: int, xs: list[Array], lows: list[Array], state: State, freqs: list[float]) -> None:
        config, w = self.config, self.weights(f"model.layers.{layer}.attn.indexer")
        heads, dim, count = config.index_n_heads, config.index_head_dim, len(state.keys)
        is_narrowed = layer > config.candidate_source_layer_id and state.candidates is not None
        narrowed, chosen = [], []
        for position, x in enumerate(xs):
            queries = w("wq_b.weight") @ lows[position]
            head_weights = w("weights_proj.weight") @ x / math.sqrt(dim) / math.sqrt(heads)
            turned = [
                self.quantized(rotated(queries[head * dim : (head + 1) * dim], position, freqs), "mxfp4")
                for head in range(heads)
            ]
            visible = min((position + 1) // state.ratio, count)
            scores = [-math.inf] * count
            for j in range(visible):
                if state.is_valid[j]:
                    dots = [float(query @ state.index_keys[j]) for query in turned]
                    scores[j] = sum(max(dot, 0) * v for dot, v in zip(dots, head_weights, strict=True))
            if layer == config.candidate_source_layer_id:
                narrowed.append(self.best_blocks(scores, visible))
            if is_narrowed:
                assert state.candidates is not None
                scores = [s if j in state.candidates[position] else -math.inf for j, s in enumerate(scores)]
            best = self.top(scores, config.index_topk)
            chosen.append(sorted(j for j in best if scores[j] > -math.inf))
        if layer == config.candidate_source_layer_id:
            state.candidates = self.candidates[layer] = narrowed
        state.chosen = self.keys[layer] = chosen

    def best_blocks(self, scores: list[float], visible: int) -> list[int]:
        """Keys of the best blocks, the last visible one always among them."""
        size = self.config.candidate_block_size
        blocks = [max(scores[start : start + size]) for start in range(0, len(scores), size)]
        if visible:
            blocks[(visible - 1) // size] = math.inf
        best = self.top(blocks, self.config.candidate_topk_blocks)
        return [j for j, score in enumerate(scores) if j // size in best and score > -math.inf]

    def top(self, scores: list[float], count: int) -> list[int]:
        """Indices of the highest scores, best first; among equal ones, those that `torch.topk` takes."""
        ranked = sorted(scores, reverse=True)
        for better, worse in zip(ranked[count - 1 : count], ranked[count:], strict=False):
            self.is_close_call |= better != 0 and 0 <= better - worse < 10 * NEAR
        return torch.tensor(scores, dtype=torch.float64).topk(min(count, len(scores))).indices.tolist()

    def quantized(self, x: Array, kind: str) -> Array:
        if not self.config.cache_fake_quantization:
            return x
        self.is_close_call = self.is_close_call or is_near_boundary(x, kind)
        return quantized(x, kind)

    def feed_forward(
        self, layer: int, xs: list[Array], is_valid: Sequence[bool], is_image: Sequence[bool]
    ) -> list[Array]:
        config, w = self.config, self.weights(f"model.layers.{layer}.ffn")
        inner, outs = config.moe_intermediate_size, []
        self.experts[layer] = []
        for position, x in enumerate(xs):
            gate, up = w("shared_experts.gate_proj.weight") @ x, w("shared_experts.up_proj.weight") @ x
            y = w("shared_experts.down_proj.weight") @ self.swiglu(gate, up)
            scores = [math.sqrt(math.log1p(math.exp(float(row @ x)))) for row in w("gate.weight")]
            bias = w("gate.bias_vl" if is_image[position] else "gate.e_score_correction_bias")
            biased = [score + float(b) for score, b in zip(scores, bias, strict=True)]
            experts = self.top(biased, config.num_experts_per_tok) if is_valid[position] else []
            self.experts[layer].append(experts)
            total = sum(scores[expert] for expert in experts) + 1e-20
            is_normed = config.norm_topk_prob and config.num_experts_per_tok > 1
            for expert in experts:
                weight = scores[expert] / (total if is_normed else 1) * config.routed_scaling_factor
                both = x @ w("experts.gate_and_up_projs")[expert]
                act = self.swiglu(both[:inner], both[inner:]) * weight
                y = y + act @ w("experts.down_projs")[expert]
            outs.append(y)
        return outs

    def swiglu(self, gate: Array, up: Array) -> Array:
        limit = self.config.swiglu_limit or math.inf
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)

    def image_features(self, patches: torch.Tensor, rows: int, columns: int) -> list[Array]:
        config, w = self.vision, self.weights("model.vision")
        dim = config.hidden_size // config.num_attention_heads
        rope = dim // 2
        inverse = [config.rope_theta ** (-i / rope) for i in range(0, rope, 2)]
        places = [(row, column) for row in range(rows) for column in range(columns)]
        angles = [[row * f for f in inverse] + [column * f for f in inverse] for row, column in places]

        def turned(x: Array, position: int) -> Array:
            y = x.copy()
            for i, angle in enumerate(angles[position]):
                a, b = x[i], x[i + dim // 2]
                y[i] = a * math.cos(angle) - b * math.sin(angle)
                y[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
            return y

        flat = patches.double().flatten(1).numpy()
        xs = [w("patch_embed.proj.weight") @ patch + w("patch_embed.proj.bias") for patch in flat]
        for block in range(config.num_hidden_layers):
            b = self.weights(f"model.vision.blocks.{block}")
            reads: list[list[Array]] = [[] for _ in xs]
            rows_of = [
                b("attn.wqkv.weight") @ norm(x, b("norm1.weight"), 1e-6) + b("attn.wqkv.bias") for x in xs
            ]
            for head in range(config.num_attention_heads):
                starts = [part * config.hidden_size + head * dim for part in range(3)]
                parts = [[row[start : start + dim] for start in starts] for row in rows_of]
                queries = [turned(part[0], i) for i, part in enumerate(parts)]
                keys = [turned(part[1], i) for i, part in enumerate(parts)]
                for i, query in enumerate(queries):
                    shares = softmax(np.array([float(query @ key) / math.sqrt(dim) for key in keys]))
                    reads[i].append(
                        sum((s * p[2] for s, p in zip(shares, parts, strict=True)), np.zeros(dim))
                    )
            xs = [
                x + b("attn.wo.weight") @ np.concatenate(read) + b("attn.wo.bias")
                for x, read in zip(xs, reads, strict=True)
            ]
            for i, x in enumerate(xs):
                both = b("mlp.w1.weight") @ norm(x, b("norm2.weight"), 1e-6)
                gate, up = both[: config.intermediate_size], both[config.intermediate_size :]
                xs[i] = x + b("mlp.w2.weight") @ (silu(gate) * up)
        return self.aligned([norm(x, w("norm.weight"), 1e-6) for x in xs], rows, columns)

    def aligned(self, xs: list[Array], rows: int, columns: int) -> list[Array]:
        ratio, size, w = self.vision.downsample_ratio, self.vision.hidden_size, self.weights("model.aligner")
        features = []
        for top in range(0, rows, ratio):
            for left in range(0, columns, ratio):
                square = np.zeros((size, ratio, ratio))
                for row in range(top, min(top + ratio, rows)):
                    for column in range(left, min(left + ratio, columns)):
                        square[:, row - top, column - left] = xs[row * columns + column]
                inner = gelu(w("w1.weight") @ square.flatten() + w("w1.bias"))
                features.append(w("w2.weight") @ inner + w("w2.bias"))
        return features


def collapsed(streams: list[Array], mix: Array) -> Array:
    return sum((share * x for share, x in zip(mix, streams, strict=True)), np.zeros_like(streams[0]))


def expanded(out: Array, streams: list[Array], hyper: tuple[Array, Array, Array]) -> list[Array]:
    _, post, comb = hyper
    return [post[j] * out + collapsed(streams, comb[:, j]) for j in range(len(streams))]
