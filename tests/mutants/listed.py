"""Mistakes that are easily made and change results, one place each, spread over the library."""

from __future__ import annotations

from tests.mutants import Mutant

_LINEAR_ALGEBRA = (
    Mutant(
        "halves of an inverse without the sign between",
        "linalg.py",
        "-second @ (factor[..., half:, :half] @ first)",
        "second @ (factor[..., half:, :half] @ first)",
    ),
    Mutant("a jitter left in", "linalg.py", "JITTERS = (0.0, 1e-12,", "JITTERS = (1e-8, 1e-12,"),
    Mutant(
        "an innovation that forgets what was observed before",
        "weights.py",
        "row_product(features, self.base_mean) + row_product(rows, self.shift)",
        "row_product(features, self.base_mean)",
    ),
    Mutant(
        "targets mapped without a transpose",
        "weights.py",
        "energy=matrix.mT @ self.energy @ matrix",
        "energy=matrix @ self.energy @ matrix",
    ),
    Mutant(
        "a state that changes with the module",
        "tensors.py",
        "tuple(tensor.detach().clone() for tensor in _tensors(module))",
        "tuple(tensor.detach() for tensor in _tensors(module))",
    ),
    Mutant(
        "a state without buffers",
        "tensors.py",
        "found += each._buffers.values()",
        "pass",
    ),
)

_PROCESSES = (
    Mutant(
        "a covariance without the residual",
        "process.py",
        "return covariance if residual is None else covariance + residual",
        "return covariance",
    ),
    Mutant(
        "fantasies of a fantasy that know nothing of the first",
        "process.py",
        "stack_columns(cross, new.factor)",
        "stack_columns(torch.zeros_like(cross), new.factor)",
    ),
    Mutant(
        "known points recognised by the first of them",
        "process.py",
        "bool((before == first).all() and (after == last).all())",
        "bool((before == first).all())",
        ("tests/acquisition/test_known_points.py",),
    ),
    Mutant(
        "a root of eigenvalues for eigenvalues",
        "linalg.py",
        "eigenvalues.clamp_min(0.0).sqrt()",
        "eigenvalues.clamp_min(0.0)",
        ("tests/test_linalg.py",),
    ),
)

_BASES = (
    Mutant(
        "a gradient in lengthscales of half the pairs",
        "bases/radial.py",
        "weights = weights + weights.mT",
        "weights = 0.5 * (weights + weights.mT)",
        ("tests/models/auto/test_exact_gradient.py",),
    ),
    Mutant(
        "the last cell never found",
        "bases/grid/mesh.py",
        "(torch.tensor(grid.cells) - 1).to(device)",
        "(torch.tensor(grid.cells) - 2).clamp_min(0).to(device)",
    ),
    Mutant(
        "a permutation for its inverse",
        "bases/grid/interpolation.py",
        "self.member.argsort(stable=True).argsort()",
        "self.member.argsort(stable=True)",
    ),
    Mutant(
        "a gradient without the output scale",
        "bases/grid/contraction.py",
        "total = trace * (factors.scale() / present)",
        "total = trace",
    ),
    Mutant(
        "an integral over a box for the mean over it",
        "bases/grid/interpolation.py",
        "quadrature / (high - low)",
        "quadrature",
        ("tests/acquisition/test_feature_nipv.py",),
    ),
    Mutant(
        "a gram that a copy shares",
        "weights.py",
        "gram.clone() if gram.shape[-3] == 1",
        "gram if gram.shape[-3] == 1",
        ("tests/models/test_subset.py",),
    ),
    Mutant(
        "a new point's variance for what others leave of it",
        "bases/inducing.py",
        "safe_cholesky(self.residual_covariance(X, X, cross, cross))",
        "safe_cholesky(kernel_matrix(self.kernel, X, X, self.outputs))",
        ("tests/allocation/test_novelty.py",),
    ),
)

_LIKELIHOODS_AND_POINTS = (
    Mutant(
        "a jitter that is not differentiated",
        "marginal_likelihood.py",
        "if ctx.jitter > 0.0:",
        "if ctx.jitter < 0.0:",
    ),
    Mutant(
        "a divergence with a sign turned",
        "likelihoods/sites.py",
        "u.square().sum((-2, -1)) - traced + log_precision",
        "u.square().sum((-2, -1)) + traced + log_precision",
    ),
    Mutant(
        "a Gumbel variable that has mean zero",
        "likelihoods/sites.py",
        ".sum(-2)).sum(-1) - _EULER",
        ".sum(-2)).sum(-1)",
    ),
    Mutant(
        "neighbours only within two radii",
        "allocation/cover_tree.py",
        "NEIGHBOURHOOD = 4.05",
        "NEIGHBOURHOOD = 2.0",
    ),
    Mutant(
        "novelty by the kernel of before",
        "allocation/oips.py",
        "is_same((held.basis.Z,), (Z,)) and is_in(kernel, held.state)",
        "is_same((held.basis.Z,), (Z,))",
    ),
)

_ACQUISITION = (
    Mutant(
        "a path that errs by variances, not deviations",
        "acquisition/paths.py",
        "(values + own.sqrt() * draws.normal(factor.shape[-1]))",
        "(values + own * draws.normal(factor.shape[-1]))",
        ("tests/acquisition/test_paths_of_models.py", "tests/acquisition/test_paths.py"),
    ),
    Mutant(
        "features left out before a refit",
        "loops/optimization/optimizer.py",
        "model.truncate(0.0)",
        "model.truncate(LEFT_OUT)",
    ),
)

_MODELS = (
    Mutant(
        "a standardisation by n for n - 1",
        "models/outcomes/base.py",
        "(squares.clamp_min(0.0) / (count - 1.0).clamp_min(1.0)).sqrt()",
        "(squares.clamp_min(0.0) / count.clamp_min(1.0)).sqrt()",
        ("tests/models/test_outcomes.py",),
    ),
    Mutant(
        "known noise over a deviation, not a variance",
        "models/inference.py",
        "NoiseGroup(memory.known, self.scale.square().reciprocal())",
        "NoiseGroup(memory.known, self.scale.reciprocal())",
        ("tests/models/test_outcomes.py", "tests/models/test_equivalence.py"),
    ),
    Mutant(
        "a misfit with half of its cross term",
        "marginal_likelihood.py",
        "(quadratic - 2.0 * linear + spread) / group.level",
        "(quadratic - linear + spread) / group.level",
    ),
    Mutant(
        "known noise that is taken out by adding it",
        "models/memory.py",
        "weight = (self.sign * self.known.to(self.targets)).expand(self.noise.shape)",
        "weight = self.known.to(self.targets).expand(self.noise.shape)",
    ),
    Mutant(
        "an observation where its input was, not at its centre",
        "models/clustered/inference.py",
        "centres, room = after.centres[clusters], cache.room - len(data)",
        "centres, room = X, cache.room - len(data)",
    ),
    Mutant(
        "a posterior of hyperparameters of before",
        "models/clustered/inference.py",
        "if cache is None or not prior.is_in(cache.state):",
        "if cache is None:",
    ),
    Mutant(
        "local models forgotten that changed before the last update",
        "models/local.py",
        "touched=cache.touched | touched",
        "touched=touched",
    ),
)

_FAMILIES = (
    Mutant(
        "features of a kernel that has moved",
        "models/wiski/inference.py",
        "if whitening is None or not is_in(prior.kernel, whitening.state):",
        "if whitening is None:",
        ("tests/models/test_caches.py",),
    ),
    Mutant(
        "a posterior that takes in what leaves",
        "models/wiski/cache.py",
        "data.sign > 0.0 and process.weights",
        "process.weights",
        ("tests/models/test_caches.py",),
    ),
    Mutant(
        "log squares told apart by a share, not its square",
        "models/wiski/heteroscedastic_inference.py",
        "LOG_SQUARE_VARIANCE / share.square()",
        "LOG_SQUARE_VARIANCE / share",
    ),
    Mutant(
        "what old points alone knew forgotten in the bound",
        "models/inducing/memory.py",
        "PointStatistics(basis.values, statistics, self.trace + gone, anchors)",
        "PointStatistics(basis.values, statistics, self.trace, anchors)",
    ),
    Mutant(
        "a window one row too wide",
        "models/inducing/memory.py",
        "left = max(0, window - len(new))",
        "left = max(0, window - len(new) + 1)",
    ),
    Mutant(
        "some columns for all in a divergence",
        "models/decoupled/posterior.py",
        "len(self.posterior.alpha) / max(len(columns.index), 1)",
        "1.0",
    ),
    Mutant(
        "a best posterior without the prior mean",
        "models/decoupled/collapse.py",
        "sites.shift - precision * now.constant.unsqueeze(-1)",
        "sites.shift",
    ),
    Mutant(
        "a best variance for the best deviation",
        "models/quadruply_stochastic/memory.py",
        "(noise / (count * mean_squares + noise * precision)).sqrt()",
        "(noise / (count * mean_squares + noise * precision))",
    ),
    Mutant(
        "two draws added up for their mean",
        "models/quadruply_stochastic/steps.py",
        "0.5 * (estimates[0] + estimates[1])",
        "estimates[0] + estimates[1]",
    ),
    Mutant(
        "a sample whose earlier values change with it",
        "models/stochastic/replay.py",
        "data = map_tensors(self.room.data, torch.clone)",
        "data = self.room.data",
    ),
    Mutant(
        "a change of features without a transpose",
        "models/last_layer/inference.py",
        "T = MatrixMap(A.mT)",
        "T = MatrixMap(A)",
    ),
)

MUTANTS = (
    *_LINEAR_ALGEBRA,
    *_PROCESSES,
    *_BASES,
    *_LIKELIHOODS_AND_POINTS,
    *_ACQUISITION,
    *_MODELS,
    *_FAMILIES,
)
