"""Timing of several contenders in interleaved rounds, so that what disturbs one disturbs all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.environment import CpuWatch


@dataclass(frozen=True)
class Action:
    """Something to time.

    Args:
        run: the timed part.
        setup: called before every call of ``run``, not timed, with the number of the call; what it returns goes to
            ``run``.
    """

    run: Callable[[Any], object]
    setup: Callable[[int], Any]


@dataclass(frozen=True)
class Statistics:
    """Median and spread of one sample a round."""

    median: float
    min: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Statistics:
        ordered = sorted(samples)
        return cls(
            statistics.median(ordered), ordered[0], _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered)
        )


@dataclass
class Measurement:
    """Seconds of each action, one sample a round.

    Attributes:
        seconds: by action; all lists have one entry a round.
        other_cores: cores that other processes kept busy, on average over the rounds.
    """

    seconds: dict[str, list[float]]
    other_cores: float = 0.0

    def statistics(self, name: str, scale: float = 1.0) -> Statistics:
        return Statistics.of([scale * sample for sample in self.seconds[name]])

    def ratios(self, numerator: str, denominator: str) -> list[float]:
        """Time of one action over time of another, round by round."""
        return [a / b for a, b in zip(self.seconds[numerator], self.seconds[denominator], strict=True)]

    def map_rounds(self, function: Callable[[Mapping[str, float]], float]) -> list[float]:
        """A number a round from the seconds of all actions in that round."""
        names = list(self.seconds)
        return [function(dict(zip(names, row))) for row in zip(*self.seconds.values(), strict=True)]


@dataclass(frozen=True)
class Effort:
    """How much time a measurement may take.

    Args:
        rounds: rounds at most.
        min_rounds: rounds made in any case.
        seconds: no further round is begun after this long.
        visit_seconds: time for one action in one round, while calls last less than that; a longer call is made once.
        max_calls: calls of one action in one round at most.
    """

    rounds: int = 7
    min_rounds: int = 3
    seconds: float = 20.0
    visit_seconds: float = 0.05
    max_calls: int = 25


Timer = Callable[[Callable[[], object]], float]


def by_the_clock(run: Callable[[], object]) -> float:
    """Seconds that a call takes on the CPU."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def by_cuda_events(run: Callable[[], object]) -> float:
    """Seconds between the start and the end of a call's work on the current GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(actions: Mapping[str, Action], effort: Effort, timer: Timer = by_the_clock) -> Measurement:
    """Times actions in rounds.

    Every round visits each action once, in alternating order. A visit is one call that is not counted, which brings the
    action's data back into the caches, then some that are; the round's sample is their median. An action that takes
    longer than a visit may is called once, without the uncounted call: such actions do not fit in caches anyway.
    Garbage collection is off meanwhile.
    """
    counters = dict.fromkeys(actions, 0)

    def call(name: str) -> float:
        action = actions[name]
        argument = action.setup(counters[name])
        counters[name] += 1
        return timer(lambda: action.run(argument))

    result = Measurement({name: [] for name in actions})
    gc.disable()
    try:
        estimates = {}
        for name in actions:
            estimates[name] = call(name)
            if estimates[name] < 10 * effort.visit_seconds:  # first calls can be far slower
                estimates[name] = call(name)
        begin, watch = time.perf_counter(), CpuWatch()
        order = list(actions)
        for number in range(effort.rounds):
            if number >= effort.min_rounds and time.perf_counter() - begin > effort.seconds:
                break
            for name in order:
                calls = min(effort.max_calls, int(effort.visit_seconds / estimates[name]))
                if calls >= 1:
                    call(name)
                sample = statistics.median(call(name) for _ in range(max(1, calls)))
                estimates[name] = sample
                result.seconds[name].append(sample)
            order.reverse()
        result.other_cores = watch.other_cores()
    finally:
        gc.enable()
    return result


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the ordered samples."""
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
