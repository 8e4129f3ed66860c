"""How NeMo AutoModel shards DeepSeek-V4.1: by its marks, the vision tower's norms in units of their own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp.interop.nemo import AnnotatedModelParallelizer, unwrapped
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41VisionRMSNorm
from annotate_fsdp.models.deepseek_v41.vision import DeepseekV41VisionBlock, DeepseekV41VisionTransformer


def fully_shard_deepseek_v41(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard one piece of the model in place, the norms of a vision tower or vision block before it.

    Any other module becomes one unit. An all-fp32 policy is no special case: the norms are units then too,
    and the output dtype is the policy's.

    Args:
        module: a tower or block may stand behind `checkpoint_wrapper`, and so may its norms.
        mesh: the ranks it is sharded over.
        mp_policy: precision of all but the norms, which compute in fp32 and cast for themselves.
        offload_policy: as in `fully_shard`, for every unit.
        reshard_after_forward: likewise.
        ignored_params: parameters of any shape that something else manages; each unit leaves those below
            it as they are, the placements of DTensors included.

    Returns:
        `module` itself.

    Raises:
        AnnotationError: the module or an argument is wrong; nothing was sharded.
    """
    return PARALLELIZER._fully_shard_module(
        module,
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        ignored_params=ignored_params,
    )


class DeepseekV41ModelParallelizer(AnnotatedModelParallelizer):
    """Shard DeepSeek-V4.1 by its marks; module by module, only the vision tower's norms get own units.

    The framework groups a language block's parameters by dtype, so that its fp32 islands are units before
    it arrives here.
    """

    def islands(self, module: nn.Module) -> Iterable[nn.Module]:
        """Yield the norms at or below `module` if it is a vision tower or a vision block, wrapped or not."""
        if isinstance(unwrapped(module), DeepseekV41VisionTransformer | DeepseekV41VisionBlock):
            yield from (each for each in module.modules() if isinstance(each, DeepseekV41VisionRMSNorm))


PARALLELIZER = DeepseekV41ModelParallelizer()
