"""Modules whose state goes through code of their own: overridden methods and state dict hooks, told from torch's own.

What torch's wrappers and FSDP register is known and left out here; the rest has to run as ``state_dict`` and
``load_state_dict`` would run it. Which tensors a module has is unknown here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, cast

from attrs import field, frozen
from torch import nn

from fdsd.comms.wrappers import FSDP1_WRAPPED, wrapped_as
from fdsd.data.errors import FdsdError, SpecMismatch, Unsupported, listing

__all__ = [
    "Kind",
    "Machine",
    "has_own_code",
    "kind_of",
    "loading_code",
    "method_of",
    "post_hooks",
    "run_pre_hooks",
    "saving_code",
]

_AC = "torch.distributed.algorithms._checkpoint."
_FSDP = "torch.distributed.fsdp."
_FSDP1_HOOKS = "torch.distributed.fsdp._state_dict_utils"
_LAZY = "torch.nn.modules.lazy"
# what only reads files of older versions of torch, or goes with a wrapper
_HARMLESS = ("torch.nn.modules.", "torch.nn.utils.", "torch.nn.parallel.", "torch._dynamo.", _AC, _FSDP)


@frozen
class Kind:
    """What there is to know of a class of modules.

    Args:
        wraps: The name of the module that it wraps, for a wrapper.
        saving: The methods of its own by which it saves.
        loading: The methods of its own by which it loads.
        has_extra: Whether it has an extra state.
    """

    wraps: str | None
    saving: tuple[str, ...]
    loading: tuple[str, ...]
    has_extra: bool


def kind_of(module: nn.Module) -> Kind:
    """Read the class of a module.

    >>> kind_of(nn.BatchNorm1d(2))
    Kind(wraps=None, saving=(), loading=(), has_extra=False)
    """
    cls = type(module)
    return Kind(
        wrapped_as(cls),
        tuple([name for name in ("state_dict", "_save_to_state_dict") if _is_own(cls, name)]),
        tuple([name for name in ("load_state_dict", "_load_from_state_dict") if _is_own(cls, name)]),
        getattr(cls, "get_extra_state", None) is not nn.Module.get_extra_state,
    )


def _is_own(cls: type[nn.Module], name: str) -> bool:
    found = getattr(cls, name)
    return found is not getattr(nn.Module, name) and not _is_harmless(found)


def _is_harmless(function: Any) -> bool:
    return _is_harmless_home(_home(function))


@lru_cache(1 << 8)
def _is_harmless_home(home: str) -> bool:
    return home.startswith(_HARMLESS) and home != _LAZY


def _home(function: Any) -> str:
    """Give the module in which a function, or the class of a callable object, was written."""
    if type(function) is FunctionType and not function.__dict__:
        return function.__module__
    last: Any = function
    while function is not None:
        last = function
        found = [getattr(function, name, None) for name in ("hook", "func", "__func__")]
        function = next((one for one in found if one is not None), None)
    home = getattr(last, "__module__", None)
    return home if isinstance(home, str) else ""


def _patched(module: nn.Module, *names: str) -> Sequence[str]:
    """List the methods that were replaced on one module, but for those that call back into a getter of states."""
    own = module.__dict__
    found = [name for name in names if name in own]
    if not found:
        return ()
    return [one for one in found if not getattr(own[one], "__qualname__", "").startswith("_patch_model_state_dict.")]


def run_pre_hooks(module: nn.Module, prefix: str, home: str = "") -> None:
    """Run the hooks that have to run before a module is read: all but those of FSDP1, which would gather it.

    Args:
        module: The module; what is in it has hooks of its own.
        prefix: Its canonical name with the dot.
        home: The package in which they were written, if not all run.
    """
    inside: Any = module
    for hook in [*inside._state_dict_pre_hooks.values()]:
        where = _home(hook)
        if where.startswith(home) and where != _FSDP1_HOOKS:
            hook(module, prefix, False)


def post_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """List the hooks that may change what is shown of a module: all but those of wrappers, which drop a segment."""
    inside: Any = module
    return [hook for hook in inside._state_dict_hooks.values() if not _home(hook).startswith((_AC, _FSDP))]


def has_own_code(module: nn.Module, kind: Kind) -> bool:
    """Tell quickly whether a module may have code of its own; nearly none has, though FSDP2 hooks into many.

    >>> has_own_code(nn.Linear(1, 1), kind_of(nn.Linear(1, 1)))
    False
    """
    inside: Any = module
    own, before, after = module.__dict__, inside._load_state_dict_pre_hooks, inside._load_state_dict_post_hooks
    return bool(
        kind.saving
        or kind.loading
        or inside._state_dict_hooks
        or (before and not all(map(_is_harmless, before.values())))
        or (after and not all(map(_is_harmless, after.values())))
        or "state_dict" in own
        or "load_state_dict" in own
        or "_save_to_state_dict" in own
        or "_load_from_state_dict" in own
    )


def saving_code(module: nn.Module, kind: Kind) -> tuple[str, ...]:
    """Name the code of its own by which a module saves.

    >>> linear = nn.Linear(1, 1)
    >>> _ = linear.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    >>> saving_code(linear, kind_of(linear))
    ('the state dict hook <lambda>',)
    """
    patched = _patched(module, "state_dict", "_save_to_state_dict")
    inside: Any = module
    hooks = [f"the state dict hook {_told(hook)}" for hook in post_hooks(module)] if inside._state_dict_hooks else ()
    return (*kind.saving, *patched, *hooks)


def loading_code(module: nn.Module, kind: Kind) -> tuple[str, ...]:
    """Name the code of its own by which a module loads.

    >>> linear = nn.Linear(1, 1)
    >>> _ = linear.register_load_state_dict_post_hook(lambda module, keys: None)
    >>> loading_code(linear, kind_of(linear))
    ('the load hook <lambda>',)
    """
    inside: Any = module
    before, after = inside._load_state_dict_pre_hooks, inside._load_state_dict_post_hooks
    given: list[Any] = [*before.values(), *after.values()]
    hooks = [f"the load hook {_told(hook)}" for hook in given if not _is_harmless(hook)] if given else ()
    patched = _patched(module, "load_state_dict", "_load_from_state_dict")
    return (*kind.loading, *patched, *hooks)


def _told(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return str(name).rpartition("<locals>.")[2]


@frozen(eq=False)
class Machine:
    """A module that saves or loads, itself and what is below it, by code of its own.

    Args:
        module: The module.
        prefix: The canonical name of the module, with its dot; empty for a whole model.
        saving: The code by which it saves.
        loading: The code by which it loads.
        paths: For each module below: how its canonical prefix is spelled by ``load_state_dict`` of ``module``.
    """

    module: nn.Module = field(repr=False)
    prefix: str
    saving: tuple[str, ...]
    loading: tuple[str, ...]
    paths: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        what = listing(dict.fromkeys((*self.saving, *self.loading)), sort=False)
        return f"{type(self.module).__name__} at {self.prefix[:-1] or 'the top'!r}, which has {what}"

    def spell(self, fqn: str) -> str:
        """Give the key by which the module's own ``load_state_dict`` knows a canonical name."""
        at = fqn
        while (end := at.rfind(".")) >= 0:
            at = at[:end]
            if at + "." in self.paths:
                return self.paths[at + "."] + fqn[end + 1 :]
        return self.paths.get("", "") + fqn

    def read(self, key: str) -> str:
        """Give the canonical name of a key of the module's own ``state_dict``, which begins with ``prefix``.

        A key that ends in a dot stands for a module.
        """
        rest = key.removeprefix(self.prefix) if key.startswith(self.prefix) else key
        spelled = {path: prefix for prefix, path in self.paths.items()}
        at = rest.rfind(".")
        while at >= 0:
            if rest[: at + 1] in spelled:
                return spelled[rest[: at + 1]] + rest[at + 1 :]
            at = rest.rfind(".", 0, at)
        return self.prefix + rest if key.startswith(self.prefix) else key

    def load(
        self, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load by the module's own code, as ``load_state_dict`` runs it: hooks, overridden methods, children.

        Args:
            values: For names of the state dict at and below the module their values, laid out as the live ones.
            metadata: The versions that were saved, by canonical names.
            strict: Whether all names have to be there, and no others.

        Returns:
            Without ``strict``, the names that the code finds missing, and those that it did not expect.

        Raises:
            SpecMismatch: The code refuses the values, or names are missing or unexpected.
            Unsupported: FSDP1 has parameters below the module.
        """
        if any(wrapped_as(type(one)) == FSDP1_WRAPPED for one in self.module.modules()):
            raise Unsupported(
                f"{self}: FSDP's flat parameters below it can be read, but not written through code that knows "
                "nothing of them. Load before wrapping, or use fully_shard()."
            )
        names = {self.spell(name): name for name in values}
        given: OrderedDict[str, Any] = OrderedDict(zip(names, values.values(), strict=True))
        if metadata is not None:
            given._metadata = self._versions(metadata)  # type: ignore[attr-defined]  # torch's own convention
        try:
            found: Any = method_of(self.module, "load_state_dict")(given, **({} if strict else {"strict": False}))
        except FdsdError:
            raise
        except Exception as error:
            raise SpecMismatch(f"{self}, does not load: {error}") from error
        told: Any = cast("Any", found) if isinstance(found, tuple) and not strict else ((), ())
        missing, unexpected = [[names.get(key) or self.read(self.prefix + key) for key in keys] for keys in told[:2]]
        return missing, unexpected

    def _versions(self, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
        made: OrderedDict[str, Any] = OrderedDict()
        for prefix, spelled in self.paths.items():
            if prefix[:-1] in metadata:
                made[spelled[:-1]] = dict(metadata[prefix[:-1]])
        return made


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Give a method of a module, but not what a getter of states has put in its place and that would call it again."""
    if name in vars(module) and not _patched(module, name):
        return partial(getattr(type(module), name), module)
    found: Callable[..., Any] = getattr(module, name)
    return found
