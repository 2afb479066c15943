"""WISKI: Woodbury inversion with structured kernel interpolation, for streams in few dimensions."""

from __future__ import annotations

from bo_stream.models.wiski.grid_gp import GridGP


class WISKI(GridGP):
    """A streaming Gaussian process on grids, for few inputs, or more in a sum or through a stem.

    The kernel is interpolated from a grid, ``k̃(x, x') = w(x)ᵀ K w(x')`` with K a Kronecker product
    (Stanton, Maddox, Delbridge and Wilson, 2021). Memory are the data's sufficient statistics on
    the grid, so an update costs the same whatever came before, and hyperparameters keep learning.

    - Few observations, at most 300 (and no more than grid nodes; none where ``max_rank`` is less
      than 300): held as rows, O(n d) memory. Fits, posteriors and fantasies are those of an exact
      model with the kernel k̃, at such a model's cost; no feature is computed unless it is asked
      for, and none is left out. One observation more, or :meth:`forget`, moves all to the grid.
    - Memory: O(7^d p) for p grid nodes, fixed. Data are not kept (small updates wait, at most 512
      rows in feature space, to be added as one), but for the latest inputs in ``train_inputs``.
    - Update: O(n 7^d) for n observations, and O(n r²) for the whitened statistics; the next
      posterior solves once in O(r³), r = ``rank``. Inputs outside the bounds grow the grid by whole
      cells, hyperparameters kept, to at most four times its first width per dimension.
    - A fantasy: O(q) cross-covariances and one q x q factor.
    - Exact: everything, given the kernel k̃ of the present hyperparameters in its r largest
      eigenvectors; updates, merges, retractions, re-standardisation, growth of the grid; gradients.
    - Approximate: k̃ itself (see :meth:`interpolation_error`), and the part ``tolerance`` of its
      trace that is left out (see :attr:`rank` and :attr:`dropped`).
    - Learned: hyperparameters, in as many of the features as the noise level asks for (the rest
      counts as white noise), kept while the kernel moves little; the gradient of that
      objective is exact. That of :meth:`log_marginal_likelihood` is exact where nothing is left
      out.
    - When: thousands to millions of observations in one to four inputs. More inputs: a kernel that
      is a sum over groups of at most four, each on a grid of its own with one joint posterior
      (memory O(p p') for each pair of grids besides); a projection of the inputs, ``stem``; or
      ``botorch.models.SingleTaskGP`` while exact inference is affordable.

    Example:
        >>> model = WISKI(train_X, train_Y, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
        >>> parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(10)]
        >>> additive = WISKI(ten_inputs, train_Y, covar_module=AdditiveKernel(*parts))
    """
