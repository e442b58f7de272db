from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.settings import InvalidField, build, merge, read_assignment, read_yaml, to_yaml


@dataclass
class Inner:
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    eps: float = 1e-8
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    limit: int | None = None
    size: int | str = 0

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise InvalidField("eps", "must not be negative")


@dataclass
class Outer:
    inner: Inner
    name: str = ""
    tables: Literal["all"] | dict[str, Literal["dense"] | Inner] = field(default_factory=dict)


def _build(text: str) -> Outer:
    return build(Outer, read_yaml(text, "file.yaml"))


def test_yaml_values_become_typed_fields() -> None:
    outer = _build("inner: {sizes: [3], eps: 1e-3, kind: b, flag: true, limit: 7, size: 8GB}\nname: x\n")
    assert outer == Outer(Inner([3], 1e-3, "b", True, 7, "8GB"), "x")


def test_what_is_left_out_is_the_default() -> None:
    assert _build("") == Outer(Inner())
    assert _build("inner:\n") == Outer(Inner())


@pytest.mark.parametrize(("text", "sizes"), [("[3, 4]", [3, 4]), ('"3,4"', [3, 4]), ("3", [3])])
def test_a_list_may_be_written_as_on_a_command_line(text: str, sizes: list[int]) -> None:
    assert _build(f"inner: {{sizes: {text}}}").inner.sizes == sizes


def test_union_takes_word_or_mapping() -> None:
    assert _build("tables: all").tables == "all"
    assert _build("tables: {t: dense, u: {limit: 3}}").tables == {"t": "dense", "u": Inner(limit=3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "file.yaml:1: unknown key 'a'; known: inner, name, tables"),
        ("inner:\n  sizess: [1]", "file.yaml:2: unknown key 'sizess' in inner; did you mean 'sizes'?"),
        ("inner:\n  eps: tiny", "file.yaml:2: inner.eps must be a number, not 'tiny'"),
        ("inner: {limit: 1.5}", "inner.limit must be a whole number, not 1.5"),
        ("inner: {limit: true}", "inner.limit must be a whole number, not True"),
        ("inner: {flag: 1}", "inner.flag must be true or false, not 1"),
        ("inner: {sizes: [a]}", "inner.sizes must be a whole number, not 'a'"),
        ("inner: {kind: c}", "inner.kind is 'c', allowed: a, b"),
        ("inner: {size: [1]}", r"inner.size must be a whole number or text, not \[1\]"),
        ("inner: 3", "inner is a section, give its keys, not 3"),
        ("name: {a: 1}", "name must be text, not a mapping"),
        ("tables: {t: {limt: 3}}", "unknown key 'limt' in tables.t; did you mean 'limit'?"),
        ("tables: some", "tables must be 'all' or a mapping, not 'some'"),
        ("\n\ninner:\n  flag: false\n  eps: -1", "file.yaml:5: inner.eps: must not be negative"),
        ("name: a\nname: b", "file.yaml:2: the key 'name' was already given at file.yaml:1"),
        ("name: [a", "file.yaml:1: not valid YAML"),
        ("- a", "file.yaml:1: expected sections"),
        ("1: a", "file.yaml:1: the key 1 is not a name"),
    ],
)
def test_wrong_settings_are_reported_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(text)


def test_merge_keeps_what_is_not_set_again() -> None:
    tree = merge(read_yaml("inner: {eps: 1.0, limit: 3}\nname: x", "f"), read_assignment("inner.limit=4"))
    assert build(Outer, tree) == Outer(Inner(eps=1.0, limit=4), "x")


def test_assignment_of_a_mapping_merges_into_it() -> None:
    tree = merge(read_yaml("tables: {t: dense}", "f"), read_assignment("tables={u: dense}"))
    assert build(Outer, tree).tables == {"t": "dense", "u": "dense"}


@pytest.mark.parametrize("text", ["a.b", "=3", "a..b=3", ".a=3"])
def test_malformed_assignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section.key=value"):
        read_assignment(text)


def test_wrong_assignment_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"--set inner.lmit=3: unknown key 'lmit' in inner; did you mean 'limit'?"):
        build(Outer, read_assignment("inner.lmit=3"))


def test_yaml_round_trip() -> None:
    outer = Outer(Inner([5], 1e-12, "b", True, None, "1MB"), "x: y", {"t": "dense", "u": Inner()})
    assert _build(to_yaml(outer)) == outer
