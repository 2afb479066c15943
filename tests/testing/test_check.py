"""``check_model`` accepts models that obey the laws, and names the law that a mistake breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError

from bo_stream.models.base import StreamingGP
from bo_stream.models.inference import SolvedWeights
from bo_stream.process import WeightSpaceProcess
from bo_stream.testing import LAWS, BrokenLawError, Setting, Traits, check_model, model_checks
from bo_stream.weights import WeightPosterior
from tests.laws.cases import CASES
from tests.laws.registry import Case
from tests.support.problems import Observations
from tests.testing.own import page_module

cosines = page_module()
OWN = Traits(
    trusted=tuple(
        getattr(cosines, f"Cosine{part}")
        for part in ("GP", "Memory", "Inference", "Kernel", "Basis")
    )
)
ONE = [Setting()]
FIRST_OF_EACH = [next(cases) for _, cases in groupby(CASES, lambda c: c.name.partition(",")[0])]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
@pytest.mark.parametrize("case", FIRST_OF_EACH, ids=lambda case: case.name)
def test_every_model_of_the_package_passes(case: Case) -> None:
    def build(*data: torch.Tensor) -> StreamingGP:
        return case.build(Observations(*data))

    check_model(build, case, settings=case.settings[:1])


def test_the_model_of_the_page_passes_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    check_model(cosines.CosineGP, OWN, settings=[Setting(batch_shape=(2,), outputs=2)])
    assert torch.equal(torch.get_rng_state(), state)


def test_known_noise_and_another_number_of_inputs() -> None:
    traits = replace(OWN, noise="mixed")
    laws = ["conditioning_is_updating_a_copy", "a_stream_is_its_batch", "order_does_not_matter"]
    check_model(cosines.CosineGP, traits, input_dim=3, settings=ONE, laws=laws)


# --- mistakes -----------------------------------------------------------------------------------


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later counts more."""
    observe = cosines.CosineInference.observe
    monkeypatch.setattr(
        cosines.CosineInference,
        "observe",
        lambda self, memory, *others: observe(self, memory.scale(0.9), *others),
    )


def keeps_the_prior_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is that of the posterior, and the covariance of the weights that of the prior."""

    def process(self: Any, memory: Any, cache: Any, prior: Any, X: Any = None) -> Any:
        basis, evidence = self.weighed(memory, prior)
        mean = cosines.solve(evidence).mean
        root = torch.eye(60, dtype=torch.float64).expand(*mean.shape[:-2], 60, 60)
        weights = WeightPosterior.of(mean, root)
        found = WeightSpaceProcess(basis, weights, prior.mean.unsqueeze(-1).clone())
        return found, SolvedWeights(prior.state(), found)

    monkeypatch.setattr(cosines.CosineInference, "process", process)


def learns_from_fantasies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditioning puts the hypothetical observations into memory, too."""
    condition = StreamingGP.condition_on_observations

    def learned(self: StreamingGP, X: Any, Y: Any, noise: Any = None, **kwargs: Any) -> Any:
        conditioned = condition(self, X, Y, noise, **kwargs)
        if X.shape[-2] > 0 and X.shape[-3:-2] == self.batch_shape:
            self.update(X, Y)
        return conditioned

    monkeypatch.setattr(cosines.CosineGP, "condition_on_observations", learned)


def loses_sums_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is written without half of what it holds."""
    monkeypatch.setattr(
        cosines.CosineMemory, "__getstate__", lambda self: vars(self.scale(0.5)), raising=False
    )


def adds_what_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = cosines.CosineInference.observe
    monkeypatch.setattr(
        cosines.CosineInference,
        "observe",
        lambda self, memory, cache, data, prior: observe(
            self, memory, cache, replace(data, sign=1.0), prior
        ),
    )


def never_solves_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache outlives a change of the hyperparameters."""
    process = cosines.CosineInference.process
    monkeypatch.setattr(
        cosines.CosineInference,
        "process",
        lambda self, memory, cache, prior, X=None: (
            process(self, memory, None, prior, X) if cache is None else (cache.process, cache)
        ),
    )


def detaches_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = cosines.CosineInference.objective

    def detached(*args: Any) -> Any:
        value, cache = objective(*args)
        return value.detach() + 0.0 * value, cache

    monkeypatch.setattr(cosines.CosineInference, "objective", detached)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "order_does_not_matter": forgets,
    "variance_never_grows": keeps_the_prior_variance,
    "conditioning_leaves_the_model_as_it_is": learns_from_fantasies,
    "a_copy_goes_on_as_the_original": loses_sums_in_files,
    "retracting_undoes_updating": adds_what_is_taken_out,
    "what_is_kept_between_calls_is_what_would_be_computed_anew": never_solves_anew,
    "the_objective_has_the_gradient_of_differences": detaches_the_objective,
}
"""What breaks a law, and leaves those of ``UNMOVED`` alone."""

UNMOVED = (
    "posterior_follows_the_inputs",
    "observation_noise_is_added_to_the_variance",
    "another_kind_of_model_cannot_be_merged",
    "training_inputs_are_the_latest_observed",
)


@pytest.mark.parametrize("law", MISTAKES)
def test_a_mistake_breaks_its_law_and_the_report_says_what_to_do(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [Setting(), Setting(batch_shape=(2,), outputs=2)]
    check_model(cosines.CosineGP, OWN, settings=settings, laws=[law])
    MISTAKES[law](monkeypatch)
    laws = [*UNMOVED[:2], law, *UNMOVED[2:]]
    with pytest.raises(BrokenLawError) as caught:
        check_model(cosines.CosineGP, OWN, settings=settings, laws=laws)
    report = str(caught.value)
    assert caught.value.laws == (law,)
    assert report.startswith("1 of 5 laws are broken")
    assert f"{law} is broken by CosineGP in {settings[0]}, {settings[1]}:" in report
    assert "Expected" in report or "not close" in report or "changed from" in report
    assert "    Where it " in report or "    Where they " in report


def test_a_class_that_is_not_trusted_is_named() -> None:
    with pytest.raises(BrokenLawError, match=r"trusted=\[.*CosineInference.*\]") as caught:
        check_model(cosines.CosineGP, settings=ONE, laws=["a_copy_goes_on_as_the_original"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_every_law_says_what_to_do() -> None:
    for name, law in LAWS.items():
        text = law.__doc__ or ""
        assert text.startswith("Check "), name
        assert "    Where " in text, name


# --- what a model cannot do ---------------------------------------------------------------------


def test_a_verb_that_is_lacking_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traits, law = replace(OWN, can_merge=False), "what_is_not_supported_is_refused"
    assert not any("merging" in check.name for check in model_checks(cosines.CosineGP, traits))
    with pytest.raises(BrokenLawError, match="Expected UnsupportedError, got no error") as caught:
        check_model(cosines.CosineGP, traits, settings=ONE, laws=[law, *UNMOVED])
    assert caught.value.laws == (law,)

    def merged(*_: Any) -> None:
        raise UnsupportedError("cosines do not add")

    monkeypatch.setattr(cosines.CosineInference, "merged", merged)
    check_model(
        cosines.CosineGP, traits, settings=ONE, laws=[law, "another_kind_of_model_cannot_be_merged"]
    )
    check_model(cosines.CosineGP, traits, settings=ONE, laws=["a_window_that_empties_fills_again"])


@pytest.mark.parametrize(
    ("traits", "law"),
    [
        ({"in_order": True}, "a_stream_is_its_batch"),
        ({"rows": True}, "order_does_not_matter"),
        ({"residual": True}, "conditioning_is_updating_a_copy"),
        ({"growing": True}, "memory_does_not_grow_with_the_stream"),
        ({"truncated": True}, "the_objective_has_the_gradient_of_differences"),
        ({"noise": "labels"}, "gradients_are_those_of_differences"),
        ({"sites": True}, "conditioning_twice_is_conditioning_once"),
        ({"can_retract": False}, "retracting_undoes_updating"),
        ({"can_forget": False}, "forgetting_half_of_everything_twice_is_everything_once"),
    ],
    ids=str,
)
def test_a_trait_takes_a_law_away(traits: dict[str, Any], law: str) -> None:
    every, fewer = (
        {check.name for check in model_checks(cosines.CosineGP, each)}
        for each in (Traits(), Traits(**traits))
    )
    assert law in every - fewer
    assert fewer - every <= {"what_is_not_supported_is_refused"}


def test_laws_are_left_out_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets(monkeypatch)
    laws = ["order_does_not_matter", UNMOVED[0]]
    exempt = {"order_does_not_matter": "what comes later counts more"}
    check_model(cosines.CosineGP, OWN, settings=ONE, laws=laws, exempt=exempt)
    checks = model_checks(cosines.CosineGP, OWN, laws=laws)
    assert [str(check) for check in checks[::3]] == [f"{law}-{Setting()}" for law in laws]
    with pytest.raises(BrokenLawError, match="order_does_not_matter"):
        checks[0]()
    checks[3]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"laws": ["no_such_law"]}, "laws to name laws.*'no_such_law'"),
        ({"exempt": {"no_such_law": "slow"}}, "exempt to name laws.*'no_such_law'"),
        ({"exempt": {"order_does_not_matter": " "}}, "reason for each law.*order_does_not_matter"),
        ({"settings": []}, "at least one Setting"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(cosines.CosineGP, OWN, **arguments)
