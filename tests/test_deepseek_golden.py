"""DeepSeek-V4.1 against reference values that another implementation computed in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM

RUNS = ["text", "image"]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    path = Path(__file__).parent / "data" / "deepseek_v41_tiny.pt"
    return dict(torch.load(path, weights_only=True))


def model_of(golden: dict[str, Any]) -> DeepseekV41ForCausalLM:
    text = golden["text_config"] | {"cache_fake_quantization": False}
    values = {"text_config": text, "vision_config": golden["vision_config"], "image_token_id": 90}
    model = DeepseekV41ForCausalLM(DeepseekV41Config.from_dict(values))
    model.load_state_dict(golden["state"])
    return model


@pytest.fixture(scope="module")
def runs(golden: dict[str, Any]) -> dict[str, dict[str, Any]]:
    results = {}
    for name in RUNS:
        model, ids = model_of(golden), golden[name]["ids"]
        images = [golden[key] for key in ("pixel_values", "grid", "types")] if name == "image" else []
        logits = model(ids, *images)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        results[name] = {"model": model, "logits": logits, "loss": loss}
    return results


@pytest.mark.parametrize("name", RUNS)
def test_logits_and_loss_equal_the_reference(name: str, golden: dict[str, Any], runs: dict[str, Any]) -> None:
    torch.testing.assert_close(runs[name]["logits"], golden[name]["logits"], rtol=0, atol=1e-4)
    assert runs[name]["loss"].item() == pytest.approx(golden[name]["loss"], abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_gradient_norms_equal_the_reference_and_are_none_where_it_has_none(
    name: str, golden: dict[str, Any], runs: dict[str, Any]
) -> None:
    grads = {parameter: tensor.grad for parameter, tensor in runs[name]["model"].named_parameters()}
    norms = {parameter: None if grad is None else grad.norm().item() for parameter, grad in grads.items()}
    assert norms == {
        parameter: None if norm is None else pytest.approx(norm, rel=1e-3, abs=1e-6)
        for parameter, norm in golden[name]["grad_norms"].items()
    }


def test_only_the_indexer_and_the_unused_image_parts_have_no_gradient(runs: dict[str, Any]) -> None:
    image_parts = ("model.vision.", "model.aligner.", "model.image_")
    for name in RUNS:
        for parameter, tensor in runs[name]["model"].named_parameters():
            unused = name == "text" and parameter.startswith(image_parts)
            assert (tensor.grad is None) == (".indexer." in parameter or unused), parameter


def test_state_dict_has_the_reference_names_in_its_order_with_shapes_and_dtypes(
    golden: dict[str, Any], runs: dict[str, Any]
) -> None:
    def described(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()]

    assert described(runs["text"]["model"].state_dict()) == described(golden["state"])
