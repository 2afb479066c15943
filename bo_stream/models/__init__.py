"""BoTorch models that keep a stream in fixed-size memory.

What every model shares:

- ``base``: ``StreamingGP``, the class directly above each model, which names every verb.
- ``shell``: the verbs by subject: construction, updates, posteriors, fits.
- ``outcomes``: units of the outcomes, their transform, noise, likelihood or labels.
- ``prior``: a view of the hyperparameters as they are now; copies of them to be moved.
- ``memory``: what is left of the data, and observations on their way into it.
- ``held_sites``: Gaussian sites of outcomes that are held as rows.
- ``inference``: the interface of a way from a memory to a posterior.
- ``input_transforms``: transforms of inputs in a stream, fixed or learned with the kernel.
- ``checks``: of arguments, and of models to be merged.

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
