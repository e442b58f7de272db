"""The questions that the lookup benchmark answers, one function each."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.questions.balance import balance
from benchmarks.questions.comparison import comparison
from benchmarks.questions.device import device
from benchmarks.questions.distributions import distributions
from benchmarks.questions.flow_shapes import flow_shapes
from benchmarks.questions.growth import growth
from benchmarks.questions.inference import inference
from benchmarks.questions.memory import memory
from benchmarks.questions.run import Run
from benchmarks.questions.sweeps import batch, cores, dims, flows, optimizers, pooling, ranks, shapes
from benchmarks.questions.tables import mixed, tables

QUESTIONS: dict[str, Callable[[Run], None]] = {
    question.__name__: question
    for question in (
        comparison,
        growth,
        tables,
        distributions,
        memory,
        optimizers,
        flows,
        mixed,
        balance,
        inference,
        batch,
        pooling,
        ranks,
        dims,
        cores,
        shapes,
        flow_shapes,
    )
}
DEVICE_QUESTIONS = {"device": device}  # the only ones that --device cuda answers
