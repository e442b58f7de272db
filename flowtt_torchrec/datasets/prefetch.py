"""Batches made ahead of time, in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from itertools import islice

from torchrec.datasets.utils import Batch

_PUT_SECONDS = 0.1


class Prefetcher(Iterator[Batch]):
    """Makes the next batches while the current one is in use; what their making raises comes out of ``next``.

    Args:
        batches: where they come from.
        ahead: how many wait at most, besides the one in the making.
        pin_memory: puts them into page-locked memory, from where they are copied to a GPU without waiting.

    Attributes:
        waited: seconds that ``next`` has waited.
    """

    def __init__(self, batches: Iterator[Batch], ahead: int, pin_memory: bool = False) -> None:
        self.waited = 0.0
        self._next: list[Batch] = []
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(batches, pin_memory), name="batches", daemon=True)
        self._thread.start()

    def _make(self, batches: Iterator[Batch], pin_memory: bool) -> None:
        try:
            for batch in batches:
                if not self._put(batch.pin_memory() if pin_memory else batch):
                    return
            self._put(StopIteration())
        except BaseException as error:  # an interrupt too belongs to whoever asks for the next batch
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        """Waits for a free place; returns whether anybody still wants the item."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> Batch:
        if self._next:
            return self._next.pop()
        if self._stopped.is_set():
            raise StopIteration
        started = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - started
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def at_end(self) -> bool:
        """Whether there are no more batches; waits for the next one to know."""
        if not self._next:
            self._next.extend(islice(self, 1))
        return not self._next

    def close(self) -> None:
        """Ends the thread; there are no more batches."""
        self._stopped.set()
        self._thread.join()
