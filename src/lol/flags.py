"""Flags made from typed dataclasses by tyro, with the model's own among them."""

from typing import Any

import docstring_parser
import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from lol.model.config import LoLConfig
from lol.train.config import MODEL_FIELDS


def parse(command: type[Any], verb: str, args: list[str], default: Any = None) -> Any:
    """A command's dataclass, filled by the arguments. Raises SystemExit for --help and for flags that do not fit."""
    registry = ConstructorRegistry()
    registry.struct_rule(_model_flags)
    with registry:
        return tyro.cli(command, prog=f"lol {verb}", args=args, **({} if default is None else {"default": default}))


def _model_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Flags for the fields of `LoLConfig` that belong to a run, and none for the many it inherits."""
    if info.type is not LoLConfig:
        return None
    help_of = {item.arg_name: item.description for item in docstring_parser.parse(LoLConfig.__doc__ or "").params}
    fields = tuple(
        StructFieldSpec(
            name=name,
            type=LoLConfig.__annotations__[name],
            default=getattr(info.default, name),
            helptext=help_of.get(name),
        )
        for name in MODEL_FIELDS
    )
    return StructConstructorSpec(instantiate=LoLConfig, fields=fields)


def read_flag(args: list[str], flag: str, default: str) -> str:
    """The value of a flag that decides the defaults of the others, so it is read before them."""
    for place, arg in enumerate(args):
        if arg == flag and place + 1 < len(args):
            return args[place + 1]
        if arg.startswith(f"{flag}="):
            return arg.removeprefix(f"{flag}=")
    return default
