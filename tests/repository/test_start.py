"""What is imported when, and the environment that torch is loaded into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bo_stream
import bo_stream.loops.optimization

HEAVY = ("torch", "gpytorch", "botorch", "scipy", "pandas", "matplotlib")
POLICIES = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")


def after(program: str, environment: dict[str, str] | None = None) -> Any:
    """What a fresh Python's ``result`` is after a program, read from JSON."""
    code = f"import json, os, sys\n{program}\nprint(json.dumps(result))"
    bare = {name: value for name, value in os.environ.items() if name not in POLICIES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**bare, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


LOADED = f"result = [name for name in {HEAVY} if name in sys.modules]"
COMMAND = """
from typer.testing import CliRunner
import bo_stream.cli
done = CliRunner().invoke(bo_stream.cli.app, {args})
assert done.exit_code == {code}, done.output
"""


AT_TORCH = """
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            said = {{n: os.environ[n] for n in {policies} if n in os.environ}}
            os.write(1, json.dumps(said).encode())
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["sample", "--help"], 0),
        (["optimize", "--help"], 0),
        (["optimize", "--no-such-option"], 2),
        (["survey", "start", "--help"], 0),
        (["survey", "replay", "--help"], 0),
    ],
)
def test_help_needs_no_torch(args: list[str], code: int) -> None:
    assert after(COMMAND.format(args=args, code=code) + LOADED) == []


@pytest.mark.integration
def test_importing_the_package_needs_no_torch() -> None:
    assert after("import bo_stream, bo_stream.loops.optimization\n" + LOADED) == []
    assert after("import bo_stream\nbo_stream.loops\n" + LOADED) == []


VERBS = """
import torch, bo_stream
from bo_stream.models.fitting import relearn
X = torch.linspace(0.0, 1.0, 12, dtype=torch.float64).unsqueeze(-1)
make, before = bo_stream.{model}, "sympy" in sys.modules
model = make(X, (6.0 * X).sin())
relearn(model)
model.update(X[:3], X[:3]).predictive(X)
result = "sympy" in sys.modules and not before
"""


@pytest.mark.integration
@pytest.mark.parametrize("model", ["AutoGP", "WISKI", "OSGPR"])
def test_verbs_import_no_library_for_symbols(model: str) -> None:
    assert not after(VERBS.format(model=model))  # torch does, for half a second, unless avoided


WORKER = """
import pickle
from bo_stream.loops.optimization.objectives import Objective, Task, attempt
work, task = Objective("math:fsum", ((0.0, 1.0),) * 2), Task(0, (0.25, 0.5), 0)
call = pickle.loads(pickle.dumps((attempt, work, task)))
outcome = call[0](*call[1:], {})
assert outcome.value == 0.75, outcome
"""


@pytest.mark.integration
def test_a_worker_evaluates_a_users_function_without_torch() -> None:
    """It begins in a third of a second instead of three, and a core may have many of them."""
    assert after(WORKER + LOADED) == []


@pytest.mark.parametrize("package", [bo_stream, bo_stream.loops.optimization])
def test_every_public_name_is_there(package: Any) -> None:
    listed = dir(package)
    for name in package.__all__:
        assert name in listed
        assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=f"{package.__name__} attribute No"):
        _ = package.No


@pytest.mark.integration
def test_names_are_imported_in_every_way() -> None:
    program = """
import bo_stream
assert "WISKI" in dir(bo_stream) and "WISKI" not in vars(bo_stream)
from bo_stream import *
assert WISKI is bo_stream.WISKI and "WISKI" in vars(bo_stream)
assert bo_stream.models.wiski.wiski.WISKI is WISKI
import bo_stream.process
result = [name for name in bo_stream.__all__ if name not in globals()]
"""
    assert after(program) == []


@pytest.mark.integration
@pytest.mark.parametrize("model", ["OSGPR", "WISKI", "ClusteredGP"])
def test_botorch_draws_functions_of_a_model_after_no_other_import(model: str) -> None:
    program = f"""
import torch
from bo_stream import {model}
from botorch.sampling.pathwise import draw_matheron_paths
X = torch.rand(9, 2).double()
paths = draw_matheron_paths({model}(X, X.sum(-1, keepdim=True)), torch.Size([3]))
result = list(paths(X).shape)
"""
    assert after(program) == [3, 9]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"KMP_BLOCKTIME": "50"}, {"KMP_BLOCKTIME": "50"}),
        ({"GOMP_SPINCOUNT": "9"}, {"GOMP_SPINCOUNT": "9"}),
    ],
)
def test_the_command_s_threads_wait_passively_unless_the_user_says_how(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    """Said before torch is loaded, which reads it once: the program ends there."""
    args = ["optimize", "--history", "xls"]
    program = AT_TORCH.format(policies=POLICIES) + COMMAND.format(args=args, code=2)
    assert after(program + "result = None", given) == expected


@pytest.mark.integration
def test_workers_inherit_how_threads_wait(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\ndef cost(x):\n"
        "    open('policy', 'a').write(os.environ.get('OMP_WAIT_POLICY', 'none') + ' ')\n"
        "    return x[0]\n"
    )
    (tmp_path / "command.py").write_text(
        "from bo_stream.cli import app\nif __name__ == '__main__':\n    app()\n"
    )
    args = ["mine:cost", "--bounds", "0,1", "--initial", "2", "--steps", "0", "--out", "run"]
    bare = {name: value for name, value in os.environ.items() if name not in POLICIES}
    command = [sys.executable, "command.py", "optimize", *args]
    subprocess.run(command, cwd=tmp_path, env=bare, check=True, capture_output=True)
    assert (tmp_path / "policy").read_text() == "PASSIVE PASSIVE "
