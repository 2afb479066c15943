"""A Dask cluster of processes of this machine whose manager starts again what ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bo_stream.errors import UsageError
from bo_stream.executors import DaskExecutor

ROOT = Path(__file__).parents[2]

_PATIENCE = 120.0


class DaskCluster:
    """A scheduler and workers with nannies, as a user starts them by ``dask scheduler`` and so on.

    Workers of Dask end when they lose their scheduler. Whatever ends is started again, as systemd,
    Kubernetes or a queue that requeues does.

    Attributes:
        address: Address of the scheduler, also of the next one.
    """

    def __init__(self, workers: int) -> None:
        """Prepare a cluster of some workers of one thread each."""
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        worker = ["worker", self.address, "--nthreads", "1", "--local-directory", self._folder.name]
        self._commands = {
            "scheduler": ["scheduler", "--host", "127.0.0.1", "--port", str(port)],
            **{f"worker {number}": worker for number in range(workers)},
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._is_ending = False
        self._managers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Start all, and wait until the scheduler answers."""
        for name in self._commands:
            self._managers.append(threading.Thread(target=self._keep, args=(name,)))
            self._managers[-1].start()
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                DaskExecutor(self.address).shutdown()
            except UsageError:
                if time.monotonic() > end:
                    self.__exit__(None, None, None)
                    raise
            else:
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all."""
        with self._lock:
            self._is_ending = True
            processes = list(self._processes.values())
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
        for manager in self._managers:
            manager.join()
        self._folder.cleanup()

    def _keep(self, name: str) -> None:
        """Start a process again and again."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        program, *arguments = self._commands[name]
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", "--no-dashboard"]
        while True:
            with self._lock:
                if self._is_ending:
                    return
                self._processes[name] = subprocess.Popen(
                    [*command, *arguments],
                    env={**os.environ, "PYTHONPATH": path},
                    stderr=subprocess.DEVNULL,
                )
            self._processes[name].wait()

    def kill_scheduler(self) -> None:
        """Kill the scheduler; its manager starts another one at the same address."""
        self._processes["scheduler"].kill()
