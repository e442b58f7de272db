"""What the planner takes a TT lookup to cost: constants of a machine, measured by `calibration` or from data sheets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowtt_torchrec.files import write_atomically

VERSION = 1


@dataclass(frozen=True)
class PassCost:
    """Time of one pass: ``max(flops / flops_per_ms, bytes / bytes_per_ms) + lookups * ... + flows * ...``.

    Attributes:
        flops_per_ms: floating-point operations of the products a millisecond.
        bytes_per_ms: bytes of cores and rows a millisecond.
        ms_per_lookup: of each lookup, for what is no product: its place in the plan, its bag.
        ms_per_flow: of each flow, the distinct rows with one prefix.
    """

    flops_per_ms: float
    bytes_per_ms: float
    ms_per_lookup: float = 0.0
    ms_per_flow: float = 0.0

    def __post_init__(self) -> None:
        if not (self.flops_per_ms > 0 and self.bytes_per_ms > 0 and self.ms_per_lookup >= 0 and self.ms_per_flow >= 0):
            raise ValueError(f"rates must be above 0 and times at least 0, not {self}")

    def ms(self, flops: float, moved: float, lookups: float, flows: float) -> float:
        """Milliseconds of a pass that makes so many operations and moves so many bytes."""
        products = max(flops / self.flops_per_ms, moved / self.bytes_per_ms)
        return products + lookups * self.ms_per_lookup + flows * self.ms_per_flow


@dataclass(frozen=True)
class CostConstants:
    """Costs of a device.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        source: where the numbers are from, in words that are printed beside a plan.
        forward: cost of forward with its plan, in operations, bytes, lookups and flows of forward.
        backward: cost of backward with the update, in the *same* operations, lookups and flows.
        measured: machine, versions and date of a calibration; empty for numbers from data sheets.
    """

    device: str
    source: str
    forward: PassCost
    backward: PassCost
    measured: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON that `load` reads."""
        write_atomically(Path(path), json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostConstants:
        """Reads what `save` wrote.

        Raises:
            OSError: if the file cannot be read.
            ValueError: naming the file, if it has no constants.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values.pop("version") != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            forward, backward = PassCost(**values.pop("forward")), PassCost(**values.pop("backward"))
            return cls(forward=forward, backward=backward, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} has no cost constants ({error}); make it with `python -m flowtt_torchrec calibrate`"
            ) from None


def _from_specification(name: str, device: str, tera_flops: float, giga_bytes: float) -> CostConstants:
    """Half of the peak rate for the products, as small ones are far from it, and backward as three forwards."""
    forward = PassCost(tera_flops * 1e9 / 2, giga_bytes * 1e6)
    backward = PassCost(forward.flops_per_ms / 3, forward.bytes_per_ms / 2)
    source = f"data sheet of {name}, not measured; `python -m flowtt_torchrec calibrate` measures this machine"
    return CostConstants(device, source, forward, backward)


# float32 without tensor cores, and memory bandwidth, as the vendors give them; the CPU's are of the right order only.
DEFAULTS: dict[str, CostConstants] = {
    "cpu": _from_specification("a server CPU, a few cores of it", "cpu", 0.1, 50),
    "a100": _from_specification("NVIDIA A100 80 GB SXM", "cuda", 19.5, 2039),
    "h100": _from_specification("NVIDIA H100 SXM", "cuda", 67, 3350),
}


def default_costs(device: str) -> CostConstants:
    """The shipped constants: those of the CPU, or of an A100."""
    return DEFAULTS["cpu" if device == "cpu" else "a100"]
