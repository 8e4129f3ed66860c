"""Tag a class, an instance, a factory or a method. A mark is data in one attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
import wrapt
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp.errors import AnnotationError, Finding

UNIT_ATTRIBUTE = "__fsdp_unit__"
DTYPE_ATTRIBUTE = "__fsdp_dtype__"
FORWARD_ATTRIBUTE = "__fsdp_forward__"
PLAN_ATTRIBUTE = "__fsdp_plan__"
KNOWN_ATTRIBUTES = frozenset({UNIT_ATTRIBUTE, DTYPE_ATTRIBUTE, FORWARD_ATTRIBUTE, PLAN_ATTRIBUTE})

Policy = str | torch.dtype | MixedPrecisionPolicy | Callable[[MixedPrecisionPolicy], MixedPrecisionPolicy]
Reshard = bool | int | Literal["except_last"]
T = TypeVar("T")


class UnitOptions(TypedDict, total=False):
    """The keyword options of `fsdp_unit`; see `UnitSpec`."""

    policy: Policy
    casts_itself: bool
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | Literal["enclosing"] | None
    reshard_after_forward: Reshard | None
    offload_policy: OffloadPolicy | None
    group: str | None
    param_dtypes: Mapping[str, torch.dtype]
    conditional: bool


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The value of a mark: the module is one FSDP unit.

    - policy: `"inherit"` (the caller's `mp_policy`), `"fp32"`, `"bf16"`, `"fp16"`, a floating
      `torch.dtype`, a name in the caller's `policies`, a `MixedPrecisionPolicy` (taken verbatim), or a
      callable that makes one from the caller's.
    - casts_itself: the module casts its inputs and outputs for itself; FSDP casts neither.
    - reduce_dtype: dtype of the gradient reduction; None takes the policy's.
    - output_dtype: `"enclosing"` casts a dtype island's output back to the compute dtype of the unit
      around it, a `torch.dtype` casts to that, None casts nothing.
    - reshard_after_forward: as in `fully_shard` (bool, or the world size to reshard to), or
      `"except_last"`: True but for the last, in registration order, of the same-class tagged children
      of one container. None takes the nearest enclosing tagged unit's, else the caller's.
    - offload_policy: as in `fully_shard`; None takes the caller's.
    - group: tagged modules of one group name under one enclosing unit share a unit.
    - param_dtypes: compute dtype of single parameters that the module holds directly, by name, where it is
      not the policy's (`{"A_log": torch.float32}`); kept as sorted pairs.
    - conditional: some ranks may skip it in a step. It gets no collective of its own: its parameters, and
      those of the units inside it, join the nearest unit around that is not conditional.

    Raises:
        AnnotationError: an option holds a value that no model could give a meaning.
    """

    policy: Policy = "inherit"
    casts_itself: bool = False
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | Literal["enclosing"] | None = "enclosing"
    reshard_after_forward: Reshard | None = None
    offload_policy: OffloadPolicy | None = None
    group: str | None = None
    param_dtypes: Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...] = ()
    conditional: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.param_dtypes, Mapping):
            object.__setattr__(self, "param_dtypes", tuple(sorted(self.param_dtypes.items(), key=str)))
        findings = [
            Finding("AF101", "error", "fsdp_unit", f"fsdp_unit({name}={value!r})", wrong, write)
            for name, value, wrong, write in _impossible_options(self)
        ]
        if findings:
            raise AnnotationError(findings)

    @property
    def own_dtypes(self) -> tuple[tuple[str, torch.dtype], ...]:
        """`param_dtypes` as pairs."""
        return self.param_dtypes if isinstance(self.param_dtypes, tuple) else tuple(self.param_dtypes.items())

    @property
    def names_precision(self) -> bool:
        """Whether it asks for a dtype, and not only what is gathered and freed at once."""
        return self.policy != "inherit" or self.reduce_dtype is not None


@dataclass(frozen=True)
class Off:
    """The value of a cancelled mark: the module is no unit of its own."""


@dataclass(frozen=True)
class Ignore:
    """The value of `fsdp_ignore`: the parameters below are not FSDP's; `synced` says whose they are."""

    synced: bool = False


Mark = UnitSpec | Off | Ignore


def is_float_dtype(value: object) -> bool:
    """Whether `value` is a floating-point `torch.dtype`."""
    return isinstance(value, torch.dtype) and value.is_floating_point


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...? " with the known name closest to `name`, "" if none is close."""
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}? " if close else ""


def _impossible_options(spec: UnitSpec) -> Iterator[tuple[str, object, str, str]]:
    """Yield (option, value, what is wrong, what to write) for options that can never be right."""
    policy = spec.policy
    dtype_write = "Write a torch.dtype such as torch.float32"
    if isinstance(policy, torch.dtype) and not policy.is_floating_point:
        yield "policy", policy, "parameters cannot compute in it", dtype_write
    elif not isinstance(policy, str | torch.dtype | MixedPrecisionPolicy) and (
        not callable(policy) or isinstance(policy, type)
    ):
        yield (
            "policy",
            policy,
            "a policy is a name, a torch.dtype, a MixedPrecisionPolicy or a callable that makes one",
            'Write policy="fp32", policy=torch.float32 or policy=MixedPrecisionPolicy(...)',
        )
    if spec.reduce_dtype is not None and not is_float_dtype(spec.reduce_dtype):
        yield "reduce_dtype", spec.reduce_dtype, "it is not a floating-point torch.dtype", dtype_write
    if spec.output_dtype not in (None, "enclosing") and not is_float_dtype(spec.output_dtype):
        yield (
            "output_dtype",
            spec.output_dtype,
            'it is neither a floating-point torch.dtype nor "enclosing" nor None',
            dtype_write,
        )
    if not isinstance(spec.casts_itself, bool):
        yield "casts_itself", spec.casts_itself, "it is not a bool", "Write True or False"
    if not isinstance(spec.conditional, bool):
        yield "conditional", spec.conditional, "it is not a bool", "Write True or False"
    reshard = spec.reshard_after_forward
    if not (reshard is None or reshard == "except_last" or isinstance(reshard, int)) or (
        not isinstance(reshard, bool) and isinstance(reshard, int) and reshard < 1
    ):
        yield (
            "reshard_after_forward",
            reshard,
            "it is no value that FSDP2 knows",
            'Write True, False, a world size to reshard to, or "except_last"',
        )
    if spec.offload_policy is not None and not isinstance(spec.offload_policy, OffloadPolicy):
        yield "offload_policy", spec.offload_policy, "it is no OffloadPolicy", "Write CPUOffloadPolicy()"
    if spec.group is not None and (not isinstance(spec.group, str) or not spec.group):
        yield "group", spec.group, "a group is a non-empty name", 'Write group="norms"'
    pairs = spec.param_dtypes
    if not isinstance(pairs, tuple) or not all(map(_is_name_and_dtype, pairs)):
        yield (
            "param_dtypes",
            pairs,
            "it is no dict of parameter names to floating-point dtypes",
            'Write param_dtypes={"A_log": torch.float32}',
        )
    if isinstance(policy, MixedPrecisionPolicy):
        for name in ("casts_itself", "reduce_dtype", "output_dtype"):
            if getattr(spec, name) != UnitSpec.__dataclass_fields__[name].default:
                yield (
                    name,
                    getattr(spec, name),
                    "a MixedPrecisionPolicy is taken verbatim",
                    "Put the dtype into the MixedPrecisionPolicy, or name a policy instead",
                )


def _is_name_and_dtype(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and is_float_dtype(pair[1])


@overload
def fsdp_unit(target: T, /, **options: Unpack[UnitOptions]) -> T: ...
@overload
def fsdp_unit(**options: Unpack[UnitOptions]) -> Callable[[T], T]: ...
def fsdp_unit(target: Any = None, /, **options: Unpack[UnitOptions]) -> Any:
    """Mark `target` as one FSDP unit and return the same object.

    `target` is a Module class (every instance is a unit; subclasses inherit), a Module instance, or a
    function or method that returns a module (the returned module gets the instance mark). Without a
    target the call returns the decorator. Nothing else happens until `shard_annotated` runs.

    Args:
        target: what to mark, positional only.
        **options: see `UnitSpec`.

    Raises:
        AnnotationError: an unknown option, an impossible value, or a target that can be no unit.
    """
    spec = _spec_from(dict(options))
    if target is None:
        return lambda marked: _set_mark(marked, spec, "fsdp_unit")
    return _set_mark(target, spec, "fsdp_unit")


def fsdp_off(target: T) -> T:
    """Cancel the mark that `target`, a Module class or instance, has or inherits; return the same object.

    Raises:
        AnnotationError: `target` is neither a Module class nor a Module.
    """
    marked: T = _set_mark(target, Off(), "fsdp_off", factories=False)
    return marked


@overload
def fsdp_ignore(target: T, /, *, synced: bool = False) -> T: ...
@overload
def fsdp_ignore(*, synced: bool = False) -> Callable[[T], T]: ...
def fsdp_ignore(target: Any = None, /, *, synced: bool = False) -> Any:
    """Leave every parameter below `target` alone: neither sharded, nor moved, nor reduced.

    Args:
        target: a Module class or instance.
        synced: somebody else reduces the gradients; without it a trainable parameter below is an error.

    Raises:
        AnnotationError: `target` is neither a Module class nor a Module.
    """
    mark = Ignore(synced)
    if target is None:
        return lambda marked: _set_mark(marked, mark, "fsdp_ignore", factories=False)
    return _set_mark(target, mark, "fsdp_ignore", factories=False)


def fsdp_forward(method: T) -> T:
    """Mark a method as a further entry point of its unit, as `forward` is; return the same function.

    `shard_annotated` registers it with `register_fsdp_forward_method`. Subclasses that override the
    method inherit the mark.

    Raises:
        AnnotationError: `method` is not a plain function (put the decorator closest to the function).
    """
    if not callable(method) or isinstance(method, type | classmethod | staticmethod | nn.Module):
        raise AnnotationError(
            [
                Finding(
                    "AF102",
                    "error",
                    _name_of(method),
                    f"fsdp_forward on a {type(method).__name__}",
                    "only a method that takes self can gather its unit's parameters",
                    "Put @fsdp_forward closest to the function",
                )
            ]
        )
    setattr(method, FORWARD_ATTRIBUTE, True)
    return method


def forward_methods(cls: type) -> tuple[str, ...]:
    """Return the names of the methods of `cls` that it or a base marks with `fsdp_forward`, sorted.

    `forward` is left out: it is an entry point as it is.
    """
    return tuple(
        sorted(
            {
                name
                for base in cls.__mro__
                for name, value in vars(base).items()
                if name != "forward" and callable(value) and getattr(value, FORWARD_ATTRIBUTE, False) is True
            }
        )
    )


def _spec_from(options: Mapping[str, Any]) -> UnitSpec:
    """Make a UnitSpec; an option that does not exist is named together with those that do."""
    known = [field.name for field in fields(UnitSpec)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise AnnotationError(
            Finding(
                "AF101",
                "error",
                "fsdp_unit",
                f"fsdp_unit({name}={options[name]!r})",
                "there is no such option",
                f"{did_you_mean(name, known)}Write one of {', '.join(known)}",
            )
            for name in unknown
        )
    return UnitSpec(**options)


class _MarkedFactory(wrapt.FunctionWrapper[Any, Any]):
    """A factory whose result is marked; pickled and copied by reference, as plain functions are."""

    def __reduce_ex__(self, protocol: object) -> str:
        return str(self.__qualname__)

    def __copy__(self) -> _MarkedFactory:
        return self

    def __deepcopy__(self, memo: object) -> _MarkedFactory:
        return self


def _set_mark(target: Any, mark: Mark, decorator: str, *, factories: bool = True) -> Any:
    """Write `mark` where `target` keeps it; a factory is wrapped, so that its result is marked."""
    if isinstance(target, nn.Module):
        # a wrapper such as OptimizedModule forwards attributes to what it wraps; the mark is its own
        vars(target)[UNIT_ATTRIBUTE] = mark
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        setattr(target, UNIT_ATTRIBUTE, mark)
        return target
    is_factory = callable(target) or isinstance(target, classmethod | staticmethod)
    if factories and is_factory and not isinstance(target, type | torch.Tensor):

        def marked(wrapped: Callable[..., Any], _: object, args: Any, kwargs: Any) -> Any:
            made = wrapped(*args, **kwargs)
            if not isinstance(made, nn.Module):
                raise AnnotationError([_no_target(made, decorator, f"the result of {_name_of(target)}")])
            return _set_mark(made, mark, decorator, factories=False)

        return _MarkedFactory(target, marked)
    raise AnnotationError([_no_target(target, decorator, _name_of(target))])


def _no_target(target: object, decorator: str, name: str) -> Finding:
    if isinstance(target, nn.Parameter):
        wrong = "a mark on a Parameter is lost when it is copied or sharded"
        write = "Mark the module that owns it"
    else:
        wrong = "only a Module class, a Module or a function that returns a Module can be marked"
        write = "Mark the module itself"
    return Finding("AF102", "error", name, f"{decorator} on a {type(target).__name__}", wrong, write)


def _name_of(target: object) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))
