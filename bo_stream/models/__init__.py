"""BoTorch models that keep a stream in fixed-size memory.

What every model shares:

- ``base``: ``StreamingGP``, the class above each model: what a model owns, and its verbs.
- ``botorch_hooks``: what routines of BoTorch and GPyTorch ask of a model besides a posterior.
- ``construction``: what a constructor checks and chooses; transforms of inputs in a stream.
- ``checks``: of arguments, and of models to be merged.
- ``outcomes``: units of the outcomes, their transform, noise, likelihood or labels.
- ``memory``: what is left of the data, and observations on their way into it.
- ``inference``: the prior, and the interface of a way from a memory to a posterior.
- ``fitting``: fits of hyperparameters: a model's hook, from two starts, in a run.
- ``lbfgs``: L-BFGS-B in logarithms: of all hyperparameters, or of batch elements apart.

Families, each with its models, memory and inference:

- ``auto``: exact at first, then one of the streaming families: ``AutoGP``.
- ``wiski``: on a grid: ``WISKI``, ``HeteroscedasticWISKI``, ``DirichletWISKI``.
- ``inducing``: at inducing points: ``OSGPR``, ``OSVGP``.
- ``clustered``: at the centres of a cover tree: ``ClusteredGP``.
- ``decoupled``: mean and covariance in bases of their own: ``DecoupledGP``.
- ``quadruply_stochastic``: sampled functions of a kernel: ``QSGP``, ``QSRVM``.
- ``local``: exact models of few rows each, blended: ``LocalGP``.
- ``last_layer``: the last features of a network: ``BayesianLastLayer``.
- ``stochastic``: the step loop, replay and optimisers of families that learn by steps.
"""
