"""The order of training: every epoch a new permutation of the tasks, fixed by the seed; its state is one number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gropius.types import Task


class TaskOrder:
    """An endless, seeded order over the training tasks.

    position: tasks taken so far; it alone decides what comes next, inside an epoch and across its edge.

    >>> tasks = [Task(str(i), str(i)) for i in range(5)]
    >>> order = TaskOrder(tasks, seed=0)
    >>> sorted(task.key for task in order.take(5))
    ['0', '1', '2', '3', '4']
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0):
        if not tasks:
            raise ValueError("an order needs at least one task")
        self._tasks, self._seed, self.position = tasks, seed, position
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; an epoch's edge is crossed without a gap or a repeat inside the epoch."""
        taken = []
        for position in range(self.position, self.position + count):
            epoch, place = divmod(position, len(self._tasks))
            if epoch != self._epoch:
                generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, 1, epoch))))
                self._epoch, self._permutation = epoch, generator.permutation(len(self._tasks))
            taken.append(self._tasks[int(self._permutation[place])])
        self.position += count
        return taken
