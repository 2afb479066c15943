"""BoTorch models that keep a stream in fixed-size memory.

What every model shares:

- ``base``: ``StreamingGP``, the class directly above each model, with every verb.
- ``outcomes``: units of the outcomes, their transform, noise, likelihood or labels.
- ``prior``: a view of the hyperparameters as they are now; copies of them to be moved.
- ``memory``: what is left of the data, and observations on their way into it.
- ``inference``: the interface of a way from a memory to a posterior.
- ``construction``: the steps of a constructor: first observations, default kernels, boxes.
- ``input_transforms``: transforms of inputs in a stream; the latest inputs, for BoTorch.
- ``checks``: of arguments, and of models to be merged.
- ``fitting``: fits of hyperparameters from the memory.

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
