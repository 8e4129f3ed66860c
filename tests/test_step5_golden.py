"""Step5 against reference values that another implementation computed in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM, record_choices


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    path = Path(__file__).parent / "data" / "step5_tiny.pt"
    return dict(torch.load(path, weights_only=True))


@pytest.fixture(scope="module")
def run(golden: dict[str, Any]) -> dict[str, Any]:
    model = Step5ForCausalLM(Step5Config.from_dict(golden["config"]))
    model.load_state_dict(golden["state"])
    with record_choices(model) as choices:
        logits = model(golden["ids"])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), golden["ids"][:, 1:].flatten())
    loss.backward()
    return {"model": model, "logits": logits, "loss": loss, "choices": choices}


def test_logits_and_loss_equal_the_reference(golden: dict[str, Any], run: dict[str, Any]) -> None:
    torch.testing.assert_close(run["logits"], golden["logits"], rtol=0, atol=1e-4)
    assert run["loss"].item() == pytest.approx(golden["loss"], abs=1e-5)


def test_gradient_norms_equal_the_reference_and_the_indexer_has_none(
    golden: dict[str, Any], run: dict[str, Any]
) -> None:
    grads = {name: parameter.grad for name, parameter in run["model"].named_parameters()}
    assert grads.keys() == golden["grad_norms"].keys()
    norms = {name: None if grad is None else grad.norm().item() for name, grad in grads.items()}
    assert {name for name, norm in norms.items() if norm is None} == {n for n in norms if ".indexer." in n}
    assert norms == {
        name: None if norm is None else pytest.approx(norm, rel=1e-3)
        for name, norm in golden["grad_norms"].items()
    }


def test_regions_and_experts_equal_the_reference(golden: dict[str, Any], run: dict[str, Any]) -> None:
    assert run["choices"].regions == golden["regions"]
    assert run["choices"].experts == golden["experts"]


def test_state_dict_has_the_reference_names_shapes_and_dtypes(
    golden: dict[str, Any], run: dict[str, Any]
) -> None:
    def described(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}

    assert described(run["model"].state_dict()) == described(golden["state"])
