"""Where the time of a step goes, from torch's profiler."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

# Phases of a step as TorchRec's pipelines mark them ("## forward 17 ##"), in their order; none lies in another.
_PHASES = {
    "zero_grad": "zero gradients",
    "wait_for_batch": "wait for ids",
    "start_sparse_data_dist": "send ids of the next batch",
    "copy_batch_to_gpu": "data",
    "forward": "forward",
    "wait_sparse_data_dist": "receive ids of the next batch",
    "backward": "backward and table updates",
    "optimizer": "optimizer of the dense layers",
}
_MARK = re.compile(r"## (\w+)(?: \d+)? ##")
# Operations worth a line of their own: tensor trains, dense tables (not FBGEMM's wrappers), exchange between ranks.
_OPERATION = re.compile(r"(flowtt|fbgemm|gloo|nccl)::?(?!\w*_pt2)\w+")
_MOST_OPERATIONS = 12
_STEP = "## step ##"


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Args:
        name: of the phase, or of an operation within the phases.
        milliseconds: a step, on the host.
        share: of the whole step. Those of the phases add up to one, those of operations do not.
        device_milliseconds: a step, of the GPU's work that was started in this part.
        is_phase: a phase, not an operation.
    """

    name: str
    milliseconds: float
    share: float
    device_milliseconds: float
    is_phase: bool


class StepProfiler:
    """Profiles some steps of this rank, after the first ones.

    Args:
        steps: how many; 0 for none.
        skip: steps to let pass before, while caches and allocators warm up.
        cuda: also count the GPU's time.
    """

    def __init__(self, steps: int, skip: int = 2, *, cuda: bool = False) -> None:
        self._first, self._last = skip, skip + steps
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._step = 0
        self._profile: profile | None = None
        self._mark: record_function | None = None
        self.breakdown: list[Part] = []

    def begin_step(self) -> None:
        if self._step == self._first < self._last:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        if self._profile is not None:
            self._mark = record_function(_STEP)
            self._mark.__enter__()

    def end_step(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        self._step += 1
        if self._step == self._last:
            self.stop()

    def stop(self) -> None:
        """Ends profiling. `breakdown` covers the steps that were seen; without any, the next step starts it again."""
        if self._mark is not None:  # of a step that did not take place, because the data ended
            self._mark.__exit__(None, None, None)
            self._mark = None
        if self._profile is None:
            return
        self._profile.stop()
        if self._step > self._first:
            self.breakdown = _breakdown(self._profile, self._step - self._first)
            self._last = self._first
        self._profile = None


def _breakdown(profile: profile, steps: int) -> list[Part]:
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    for event in profile.key_averages():
        mark = _MARK.fullmatch(event.key)
        name = mark[1] if mark else event.key
        host[name] = host.get(name, 0.0) + event.cpu_time_total / 1000 / steps
        device[name] = device.get(name, 0.0) + event.device_time_total / 1000 / steps
    whole = host["step"]

    def part(key: str, name: str, is_phase: bool) -> Part:
        return Part(name, host[key], host[key] / whole, device[key], is_phase)

    phases = [part(key, name, True) for key, name in _PHASES.items() if key in host]
    rest = whole - sum(p.milliseconds for p in phases)
    phases.append(Part("other", rest, rest / whole, 0.0, True))
    operations = [part(key, key, False) for key in host if _OPERATION.fullmatch(key)]
    operations.sort(key=lambda p: p.milliseconds, reverse=True)
    return [*phases, *operations[:_MOST_OPERATIONS]]
