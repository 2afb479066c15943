"""A Ray cluster of this machine."""

from __future__ import annotations

import pytest

from bo_stream.executors import LostTaskError, RayExecutor, check_workers, executor_of
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import Objective, Task
from tests.executors.functions import double, fail, leave

PATIENCE = 300.0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::bo_stream.executors.LostTaskWarning"),
    pytest.mark.filterwarnings("ignore:.*accelerator:FutureWarning"),
]


def test_tasks_that_end_well_that_fail_that_hang_and_that_are_lost() -> None:
    """In one test, since a cluster takes seconds to start."""
    with executor_of("ray:2") as executor:
        assert isinstance(executor, RayExecutor)
        assert executor.workers == 2
        check_workers(executor)
        assert list(executor.map(double, [1.0, 2.0])) == [2.0, 4.0]
        with pytest.raises(ValueError, match="not this"):
            executor.submit(fail, "not this").result(PATIENCE)
        with pytest.raises(LostTaskError):
            executor.submit(leave, 7).result(PATIENCE)
        hanging = Objective("tests.loops.functions:hang", ((0.0, 2.0),))
        with Executed(hanging, executor) as evaluator:
            evaluator.submit(Task(0, (1.7,), 0))
            assert evaluator.next_outcome().value == 1.0
            evaluator.submit(Task(1, (0.5,), 0))
            evaluator.submit(Task(2, (0.5,), 0))
            evaluator.cancel(1)
            evaluator.cancel(2)
            evaluator.submit(Task(3, (1.7,), 0))
            assert evaluator.next_outcome().value == 1.0
        with Executed(hanging, executor, timeout=3.0) as evaluator:
            for key in range(2):
                evaluator.submit(Task(key, (0.5,), 0))
            errors = {evaluator.next_outcome().error for _ in range(2)}
        assert errors == {"no outcome within 3 s: stopped"}
        with Executed(hanging, executor) as evaluator:  # no place is taken any more
            evaluator.submit(Task(2, (1.7,), 0))
            assert evaluator.next_outcome().value == 1.0
