"""Step5 as a whole against a second computation: one token, one head, one expert at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM, record_choices

State = dict[str, Tensor]


def read(state: State, prefix: str) -> Callable[[str], Tensor]:
    return lambda name: state[f"{prefix}.{name}"]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt((x * x).mean().item() + eps) * (1 + weight)


def rotated(x: Tensor, position: int, dim: int, theta: float) -> Tensor:
    y = x.clone()
    for i in range(dim // 2):
        angle = position * theta ** (-2 * i / dim)
        a, b = x[i].item(), x[i + dim // 2].item()
        y[i] = a * math.cos(angle) - b * math.sin(angle)
        y[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return y


def e4m3(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    silu = gate * torch.sigmoid(gate)
    if limit:
        silu = torch.minimum(silu, torch.tensor(limit))
        up = torch.maximum(torch.minimum(up, torch.tensor(limit)), torch.tensor(-limit))
    return silu * up


def chosen_regions(config: Step5Config, w: Callable[[str], Tensor], hs: list[Tensor], theta: float) -> Any:
    """regions[position][group], ascending."""
    sparse, groups = config.sparse_config, config.num_attention_groups
    block, rope = sparse.region_block_size, sparse.sparse_indexer_rope_dim
    per_group = sparse.sparse_indexer_num_heads // groups
    keys = []
    for position, h in enumerate(hs):
        k = w("indexer.k_proj.weight") @ h
        k = (k - k.mean()) / torch.sqrt((k * k).mean() - k.mean() ** 2 + config.rms_norm_eps)
        k = k * w("indexer.k_norm.weight") + w("indexer.k_norm.bias")
        keys.append(rotated(k, position, rope, theta))
    gates = [w("indexer.z_proj.weight") @ h for h in hs]
    summaries = []
    for start in range(0, len(hs) - block + 1, block):
        numerator = sum(gates[t].exp() * keys[t] for t in range(start, start + block))
        summary = numerator / sum(gates[t].exp() for t in range(start, start + block))
        if config.indexer_fp8_rounding:
            summary = e4m3(summary.float().bfloat16().to(summary.dtype))
        summaries.append(summary)
    regions = []
    for position, h in enumerate(hs):
        queries = (w("indexer.q_proj.weight") @ h).view(-1, sparse.proxy_dim)
        head_weights = w("indexer.w_proj.weight") @ h
        regions.append([])
        for group in range(groups):
            scores = []
            for summary in summaries[: position // block]:
                score = 0.0
                for head in range(group * per_group, (group + 1) * per_group):
                    q = rms(queries[head], w("indexer.q_norm.weight"), config.rms_norm_eps)
                    q = rotated(q, position, rope, theta)
                    q = e4m3(q) if config.indexer_fp8_rounding else q
                    score += head_weights[head].item() / math.sqrt(per_group) * max(0.0, (q @ summary).item())
                scores.append(score)
            best = sorted(range(len(scores)), key=lambda region: (-scores[region], region))[: sparse.topk]
            regions[-1].append(sorted([*best, position // block]))
    return regions


def attention(
    config: Step5Config, w: Callable[[str], Tensor], hs: list[Tensor], layer: int
) -> tuple[list[Tensor], Any]:
    dim, groups, per_group = config.head_dim, config.num_attention_groups, config.heads_per_group
    theta, rope = config.rope_theta[layer], config.rotary_dim(layer)
    is_full = config.layer_types[layer] == "full_attention"
    regions = chosen_regions(config, w, hs, theta) if is_full else None
    rows = [(w("qkv_proj.weight") @ h).view(groups, per_group + 2, dim) for h in hs]
    outputs = []
    for i, h in enumerate(hs):
        gate = torch.sigmoid(w("g_proj.weight") @ h)
        heads = []
        for group in range(groups):
            if regions is None:
                seen = [j for j in range(i + 1) if i - j < config.sliding_window]
            else:
                block = config.sparse_config.region_block_size
                seen = [j for j in range(i + 1) if j // block in regions[i][group]]
            ks = []
            for j in seen:
                k = rms(rows[j][group, per_group], w("k_norm.weight"), config.rms_norm_eps)
                ks.append(rotated(k, j, rope, theta))
            vs = torch.stack([rows[j][group, per_group + 1] for j in seen])
            for head in range(per_group):
                q = rms(rows[i][group, head], w("q_norm.weight"), config.rms_norm_eps)
                q = rotated(q, i, rope, theta)
                weights = torch.softmax(torch.stack([q @ k for k in ks]) / math.sqrt(dim), dim=0)
                heads.append(weights @ vs * gate[group * per_group + head])
        outputs.append(w("o_proj.weight") @ torch.cat(heads))
    return outputs, regions


def routed(
    config: Step5Config, w: Callable[[str], Tensor], h: Tensor, limit: float | None
) -> tuple[Tensor, list[int]]:
    p = torch.sigmoid(w("gate.weight") @ h)
    biased = (p + w("gate.e_score_correction_bias")).tolist()
    experts = sorted(range(len(biased)), key=lambda expert: -biased[expert])[: config.moe_top_k]
    total = sum(p[expert] for expert in experts) + 1e-20
    out = torch.zeros_like(h)
    inter = config.moe_intermediate_size
    for expert in experts:
        both = h @ w("experts.gate_and_up_projs")[expert]
        act = swiglu(both[:inter], both[inter:], limit)
        weight = p[expert] / total * config.moe_router_scaling_factor
        out = out + weight * (act @ w("experts.down_projs")[expert])
    return out, experts


def dense(w: Callable[[str], Tensor], h: Tensor, limit: float | None) -> Tensor:
    act = swiglu(w("gate_proj.weight") @ h, w("up_proj.weight") @ h, limit)
    return w("down_proj.weight") @ act


def slow_model(config: Step5Config, state: State, ids: list[int]) -> tuple[Tensor, Any, Any]:
    """(logits, regions[layer][position][group], experts[layer][position]) of one sequence, in fp64."""
    state = {name: tensor.double() for name, tensor in state.items()}
    xs = [state["model.embed_tokens.weight"][token] for token in ids]
    regions, experts = {}, {}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        hs = [rms(x, state[f"{at}.input_layernorm.weight"], config.rms_norm_eps) for x in xs]
        attended, chosen = attention(config, read(state, f"{at}.self_attn"), hs, layer)
        xs = [x + a for x, a in zip(xs, attended, strict=True)]
        if chosen is not None:
            regions[layer] = chosen
        hs = [rms(x, state[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps) for x in xs]
        shared = config.swiglu_limits_shared[layer]
        if layer in config.moe_layer_list:
            pairs = [routed(config, read(state, f"{at}.moe"), h, config.swiglu_limits[layer]) for h in hs]
            experts[layer] = [pair[1] for pair in pairs]
            outs = [
                p[0] + dense(read(state, f"{at}.share_expert"), h, shared)
                for p, h in zip(pairs, hs, strict=True)
            ]
        else:
            outs = [dense(read(state, f"{at}.mlp"), h, shared) for h in hs]
        xs = [x + out for x, out in zip(xs, outs, strict=True)]
    xs = [rms(x, state["model.norm.weight"], config.rms_norm_eps) for x in xs]
    return torch.stack([state["lm_head.weight"] @ x for x in xs]), regions, experts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indexer_fp8_rounding": True},
        {
            "swiglu_limits": (7.0, 0.05, 0.1, 0.2, None, 0.0, 0.3, 7.0),
            "swiglu_limits_shared": (0.3, 0.2, 0.0, 0.1, 0.4, None, 0.05, 0.1),
        },
    ],
    ids=["plain", "fp8 selection", "biting clamps"],
)
def test_whole_model_equals_a_token_by_token_computation(options: dict[str, Any]) -> None:
    golden = torch.load(Path(__file__).parent / "data" / "step5_tiny.pt", weights_only=True)
    plain = Step5Config.from_dict(golden["config"])
    config = dataclasses.replace(plain, **options)
    ids = torch.randint(config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    model = Step5ForCausalLM(config)
    model.load_state_dict(golden["state"])
    with torch.no_grad(), record_choices(model) as choices:
        logits = model(ids)
    slow, regions, experts = slow_model(config, golden["state"], ids[0].tolist())

    assert {layer: chosen[0] for layer, chosen in choices.regions.items()} == regions
    assert {layer: chosen[0] for layer, chosen in choices.experts.items()} == experts
    torch.testing.assert_close(logits[0].double(), slow, rtol=0, atol=1e-4)
    if options:
        other = Step5ForCausalLM(plain)
        other.load_state_dict(golden["state"])
        assert not torch.allclose(other(ids), logits, atol=1e-2), "the option changes nothing: a weak test"
