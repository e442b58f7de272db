"""Typed settings from YAML files and command lines: reading, merging, checking, each with the place it came from.

`read_yaml` and `read_assignment` give a tree of `Entry`, which remembers where each key was written. `merge` lays one
tree over another. `build` turns a tree into a dataclass and checks every key and type on the way, so that a wrong
setting is reported as ``configs/quickstart.yaml:12: unknown key 'epoch' in training; did you mean 'epochs'?``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

import yaml

from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.training.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One setting: where its key was written, and its value, a `Tree` if it is a mapping."""

    where: str
    value: Any


Tree = dict[str, Entry]


class InvalidField(ValueError):  # noqa: N818 - it becomes a ConfigError, with the place of the field
    """Raised by a settings dataclass in ``__post_init__``: which field is wrong, and how."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_yaml(text: str, name: str) -> Tree:
    """Reads YAML text; ``name`` is the file's name in messages.

    Raises:
        ConfigError: the text is not YAML, not a mapping, or has a key twice.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}:{node.start_mark.line + 1}: expected sections like 'training:'")
        return _tree(loader, node, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()


def _tree(loader: yaml.SafeLoader, node: yaml.MappingNode, name: str) -> Tree:
    loader.flatten_mapping(node)
    tree: Tree = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f"{where}: the key {key!r} is not a name")
        if key in tree:
            raise ConfigError(f"{where}: the key {key!r} was already given at {tree[key].where}")
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = Entry(where, _tree(loader, value_node, name))
        else:
            tree[key] = Entry(where, loader.construct_object(value_node, deep=True))
    return tree


def read_assignment(text: str, option: str = "--set") -> Tree:
    """Reads ``section.key=value``, the value in YAML.

    Example:
        >>> tree = read_assignment("training.epochs=3")
        >>> tree["training"].value["epochs"].value
        3
    """
    where = f"{option} {text}"
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"{where}: write it as section.key=value, for example {option} training.epochs=3")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {value!r} is not a valid YAML value: {error}") from None
    return assign(keys, parsed, where)


def assign(keys: Sequence[str], value: Any, where: str) -> Tree:
    """The tree that sets one key."""
    if isinstance(value, dict):
        value = {str(k): assign([str(k)], v, where)[str(k)] for k, v in value.items()}
    for key in reversed(keys):
        value = {key: Entry(where, value)}
    return value


def merge(under: Tree, over: Tree) -> Tree:
    """``under`` with the settings of ``over`` in their place; mappings are merged key by key."""
    merged = dict(under)
    for key, entry in over.items():
        below = merged.get(key)
        if below is not None and isinstance(below.value, dict) and isinstance(entry.value, dict):
            merged[key] = Entry(entry.where, merge(below.value, entry.value))
        else:
            merged[key] = entry
    return merged


def build(cls: type[T], tree: Tree, section: str = "") -> T:
    """Makes the dataclass ``cls`` out of a tree, with every key and type checked.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of another type, or a value that the
            dataclass refuses.
    """
    kinds = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key, entry in tree.items():
        if key not in known:
            place = f" in {section}" if section else ""
            hint = did_you_mean(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"{entry.where}: unknown key {key!r}{place}{hint}")
    values = {key: _convert(kinds[key], entry, f"{section}.{key}".lstrip(".")) for key, entry in tree.items()}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values and dataclasses.is_dataclass(kinds[field.name]):
            values[field.name] = build(kinds[field.name], {}, f"{section}.{field.name}".lstrip("."))
    try:
        return cls(**values)
    except InvalidField as error:
        name = f"{section}.{error.field}".lstrip(".")
        where = f"{tree[error.field].where}: " if error.field in tree else ""
        raise ConfigError(f"{where}{name}: {error}") from None


def _convert(kind: Any, entry: Entry, name: str) -> Any:
    """The value of ``entry`` as a ``kind``, a type as it stands in a dataclass."""
    value = entry.value
    if dataclasses.is_dataclass(kind):
        if value is None:  # a section with all its keys commented out
            value = {}
        if not isinstance(value, dict):
            raise ConfigError(f"{entry.where}: {name} is a section, give its keys, not {value!r}")
        return build(typing.cast(type, kind), value, name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, entry, name)
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        raise ConfigError(f"{entry.where}: {name} is {value!r}, allowed: {', '.join(arguments)}")
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if origin is list:
        if isinstance(value, str):  # as on dlrm_main's command line: 512,256,64
            value = [yaml.safe_load(part) for part in value.split(",")]
        if not isinstance(value, list):
            value = [value]
        return [_convert(arguments[0], Entry(entry.where, item), name) for item in value]
    if _accepts(kind, value):
        return float(value) if kind is float else value
    raise ConfigError(f"{entry.where}: {name} must be {_describe(kind)}, not {_show(value)}")


def _accepts(kind: Any, value: Any) -> bool:
    """Whether ``value`` may stand for the plain type ``kind``; True and False are not numbers."""
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-8 as text
        try:
            float(value)
        except ValueError:
            return False
        return True
    if isinstance(value, bool):
        return kind in (bool, Any)
    return kind is Any or isinstance(value, (int, float) if kind is float else kind)


def _convert_union(kinds: tuple[Any, ...], entry: Entry, name: str) -> Any:
    if entry.value is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    # A mapping can only be the section among the choices; its own messages are the useful ones.
    sections = [kind for kind in choices if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict]
    if isinstance(entry.value, dict) and sections:
        return _convert(sections[0], entry, name)
    plain = [kind for kind in choices if kind not in sections]
    if len(choices) == 1:
        return _convert(choices[0], entry, name)
    for kind in sorted(plain, key=lambda kind: typing.get_origin(kind) is list):  # 32 is an int before it is a list
        if kind is str and not isinstance(entry.value, str):
            continue
        try:
            return _convert(kind, entry, name)
        except ConfigError:
            continue
    kind_list = " or ".join(_describe(kind) for kind in choices)
    raise ConfigError(f"{entry.where}: {name} must be {kind_list}, not {_show(entry.value)}")


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    origin = typing.get_origin(kind)
    if origin is list:
        return f"a list of {_describe(typing.get_args(kind)[0]).removeprefix('a ')}s"
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    return names.get(kind, str(kind))


def _show(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else repr(value)


def to_yaml(settings: Any) -> str:
    """A settings dataclass as YAML that `read_yaml` and `build` read back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, default_flow_style=None, width=120)
