"""The verbs of ``StreamingGP`` by subject: functions of a model, which its class names.

- ``construction``: the steps of a constructor.
- ``updates``: observations put into memory and taken out; the latest inputs.
- ``posteriors``: from hyperparameters and memory to a posterior, also of hypothetical observations.
- ``fitting``: hyperparameters learned from the memory.
- ``units``: outcomes, inputs and noise between a user's units and those of the process.
- ``hooks``: what BoTorch's routines ask for beside a posterior.
- ``attribute``: properties that functions of a model compute.
"""
