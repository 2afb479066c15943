"""A model of very many basis functions that learns from a few data and a few functions a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from botorch.exceptions.errors import InputDataError

from bo_stream.bases.inducing import frozen
from bo_stream.models.control_points import SAMPLE, ControlPoints
from bo_stream.models.first_hyperparameters import learn_first_hyperparameters
from bo_stream.models.quadruple_bound import QuadrupleBound
from bo_stream.models.quadruple_steps import Steps
from bo_stream.models.training import Training, train
from bo_stream.module_state import is_same, state_of


class QuadrupleGP(QuadrupleBound):
    """Learning by steps on data and functions that are drawn."""

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.progress.steps

    def fit(
        self, steps: int | None = None, seconds: float | None = None, progress: bool = True
    ) -> Training:
        """Learn weights, and hyperparameters where ``empirical_bayes``; another call goes on.

        The first call learns hyperparameters by an exact GP of ``initial_points`` observations, and
        begins the weights anew for them. After Ctrl-C the model is as it was at the last check.

        Args:
            steps: Most steps to take.
            seconds: Begin no step after so many; of both limits the first to be reached counts, of
                neither a default of steps.
            progress: Whether to draw a bar, where standard error is a terminal.

        Raises:
            InputDataError: There are no data.
            ModelFittingError: The bound diverged; the model is as it was when it was good.
            UnsupportedError: The model supposes data.
            ValueError: A limit is negative; more data or functions for a step than there are.
        """
        self._check_not_supposed("fit")
        if self._memory.replay.count == 0:
            raise InputDataError("Expected data to fit, got an empty stream: call update first.")
        self._check_sizes()
        if not self._has_begun:
            self._begin_hyperparameters()
        self._place_support()
        return self._train(steps, seconds, progress, self.empirical_bayes)

    def _begin_hyperparameters(self) -> None:
        """Learn them by an exact GP, and begin the weights anew."""
        if self.initial_points > 0 and self.empirical_bayes:
            rows = self._some_rows(self.initial_points)
            modules = (self.covar_module, self.mean_module, self.likelihood)
            learn_first_hyperparameters(*modules, rows)
            self._set_memory(self._anew(self._memory, rows.X))
        self._has_begun = True

    @torch.no_grad()
    def _place_support(self) -> None:
        """Support points of the control variate, if draws leave functions out.

        Anew when the kernel has moved, or they would be of ever less use. Cost O(s p) then for s
        points, unless the weights are zero.
        """
        progress = self._memory.progress
        wanted = self.control_points > 0 and self._is_gaussian
        if not wanted or self._drawn_functions >= progress.posterior.size:
            progress.control = None
            return
        kernel, control = frozen(self.covar_module), progress.control
        if control is None or not is_same(state_of(kernel), state_of(control.basis.kernel)):
            rows = self._some_rows(SAMPLE * self.control_points)
            basis = self._memory.layout.basis(kernel, progress.precisions)
            sample = rows.X.to(self.arithmetic), rows.Y.mT.to(self.arithmetic)
            progress.control = ControlPoints.of(
                basis, self.control_points, sample, self._memory.replay.count, progress.posterior
            )

    def _learn_from_new(self) -> None:
        if self.update_steps > 0:
            self._check_sizes()
            self._place_support()
            self._train(self.update_steps, None, progress=False, learns=False)

    def _train(
        self, steps: int | None, seconds: float | None, progress: bool, learns: bool
    ) -> Training:
        learner = self._learner(learns, exact=steps != self.update_steps)
        try:
            return train(learner, steps, seconds, progress=progress)
        finally:
            self._adopt(learner, learns)

    def _learner(self, learns: bool, exact: bool) -> Steps:
        """What takes steps; it moves the weights in place.

        Args:
            learns: Whether hyperparameters are learned too.
            exact: Whether its bounds include ``log |S|`` where S is not diagonal.
        """
        hyper = self._hyper()
        return Steps(
            self._memory.progress,
            hyper,
            self._memory.layout,
            self._data,
            self._memory.replay.count,
            replace(self._schedule, functions=self._drawn_functions),
            hyper.learned(self._fixed) if learns else [],
            self._determinant(exact),
        )

    @torch.no_grad()
    def _adopt(self, learner: Steps, learns: bool) -> None:
        progress = learner.progress
        if learns:
            progress.moments = learner.moments
            for name, learned in learner.hyper.named_parameters():
                self.get_parameter(name).copy_(learned)
        self._set_memory(replace(self._memory, progress=progress))
