"""How the threads of the command wait for each other."""

from __future__ import annotations

import os

_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Of every OpenMP (GNU's among them), and of Intel's and LLVM's."""

_OWN = (*_PASSIVE, "GOMP_SPINCOUNT")
"""By which a user may have chosen already."""


def wait_passively() -> None:
    """Let threads sleep while they wait, unless the user has said how they shall wait.

    Threads that spin instead keep the cores from those that compute: beside another busy process
    an update can take a hundred times as long. OpenMP reads the environment once, when torch is
    loaded, so this must come before; worker processes inherit it.
    """
    if not any(name in os.environ for name in _OWN):
        os.environ.update(_PASSIVE)
