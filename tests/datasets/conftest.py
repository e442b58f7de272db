from __future__ import annotations

import random
from collections.abc import Callable

import pytest


@pytest.fixture
def criteo_lines() -> Callable[..., list[str]]:
    """Makes lines of raw Criteo text; the second integer of line i is i, so that a row can be recognised."""

    def make(count: int, seed: int = 0) -> list[str]:
        rng = random.Random(seed)
        lines = []
        for number in range(count):
            integers = [str(rng.randrange(-50, 5000)) if rng.random() > 0.2 else "" for _ in range(13)]
            integers[1] = str(number)
            categories = [f"{rng.getrandbits(32):08x}" if rng.random() > 0.2 else "" for _ in range(26)]
            lines.append("\t".join([str(rng.randrange(2)), *integers, *categories]))
        return lines

    return make
