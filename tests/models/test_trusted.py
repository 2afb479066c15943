"""Model files that name what would run when they are loaded."""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.models.transforms import input as inputs
from gpytorch.constraints import Interval
from gpytorch.kernels import (
    CosineKernel,
    HammingIMQKernel,
    Kernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import BetaLikelihood, FixedNoiseGaussianLikelihood, StudentTLikelihood
from gpytorch.means import LinearMean, ZeroMean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, SmoothedBoxPrior

from bo_stream import OSGPR, WISKI
from bo_stream.models.trusted import read_pickle
from tests.problems import observations


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class WiggledKernel(RBFKernel):
    """A kernel of the user's own, which keeps a method of its own as the writer of a prior."""

    def __init__(self, frequency: float, prior: GammaPrior | None = None) -> None:
        super().__init__()
        self.frequency = frequency
        if prior is not None:
            self.register_prior("own", prior, self.read, self.write)

    @staticmethod
    def read(module: WiggledKernel) -> Any:
        return module.lengthscale

    def write(self, module: WiggledKernel, value: Any) -> None:
        module.lengthscale = value

    def forward(self, x1: Any, x2: Any, diag: bool = False, **params: Any) -> Any:
        plain = super().forward(x1, x2, diag=diag, **params)
        return plain * (1.0 + 0.0 * self.frequency)


def planted(file: Path, content: Any) -> Path:
    torch.save({"format": 1, "class": "WISKI", "model": content}, file)
    return file


def model_with(kernel: Kernel) -> OSGPR:
    return OSGPR(*observations(12).astuple(), covar_module=kernel).eval()


GADGETS: dict[str, Callable[[str], Any]] = {
    "a shell": lambda mark: Calls(os.system, f"touch {mark}"),
    "an expression": lambda mark: Calls(eval, f"open({mark!r}, 'w')"),
    "a file": lambda mark: Calls(open, mark, "w"),
    "a partial function": lambda mark: Calls(functools.partial, os.system, f"touch {mark}"),
    "a module": lambda mark: Calls(__import__, "antigravity"),
    "another loader": lambda mark: Calls(torch.load, mark),
    "a name that a trusted module imports": lambda mark: Calls(Path.touch, Path(mark)),
}


@pytest.mark.parametrize("gadget", GADGETS)
def test_a_planted_file_is_refused_in_one_line(tmp_path: Path, gadget: str) -> None:
    mark = tmp_path / "mark"
    file = planted(tmp_path / "model.pt", GADGETS[gadget](str(mark)))
    with pytest.raises(ValueError, match=r"model\.pt names .*not trusted") as error:
        WISKI.load(file)
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_the_planted_file_would_have_run(tmp_path: Path) -> None:
    """The gadget works where nothing stops it."""
    mark = tmp_path / "mark"
    file = planted(tmp_path / "model.pt", GADGETS["a shell"](str(mark)))
    torch.load(file, weights_only=False)
    assert mark.exists()


def raw(file: Path, program: bytes) -> Path:
    """A file of torch's form with a pickle of one's own."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            content = program if name.endswith("data.pkl") else old.read(name)
            new.writestr(name, content)
    return file


def asking(owner: bytes, attribute: bytes) -> bytes:
    """A pickle that calls ``getattr(owner, attribute)``."""
    text = b"X" + len(attribute).to_bytes(4, "little") + attribute
    return b"\x80\x02c__builtin__\ngetattr\n" + owner + text + b"\x86R."


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (b"cbo_stream.models.wiski.wiski\nWISKI\n", b"load"),
        (b"cgpytorch.kernels.rbf_kernel\nRBFKernel\n", b"__init_subclass__"),
        (b"cgpytorch.kernels.rbf_kernel\nRBFKernel\n)\x81", b"__class__"),
        (b"cgpytorch.kernels.rbf_kernel\nRBFKernel\n)\x81", b"load_state_dict"),
        (b"ctorch._C\n_VariableFunctionsClass\n", b"from_file"),
        (b"cgpytorch.utils.transforms\ninv_softplus\n", b"__globals__"),
    ],
)
def test_only_methods_that_modules_keep_are_read(
    tmp_path: Path, owner: bytes, attribute: bytes
) -> None:
    file = raw(tmp_path / "model.pt", asking(owner, attribute))
    with pytest.raises(ValueError, match=f"it asks for '{attribute.decode()}'"):
        read_pickle(file, None)


@pytest.mark.parametrize(
    "name",
    [
        b"bo_stream.models.trusted\nPath",
        b"bo_stream.models.trusted\nread_pickle",
        b"bo_stream.storage\natomic_write",
        b"bo_stream.models.no_such_module\nThing",
        b"bo_stream.modelsevil\nThing",
        b"torch.distributions.normal\ntorch",
    ],
)
def test_of_trusted_packages_only_classes_defined_there_are(tmp_path: Path, name: bytes) -> None:
    file = raw(tmp_path / "model.pt", b"\x80\x02c" + name + b"\n.")
    with pytest.raises(ValueError, match="not trusted"):
        read_pickle(file, None)


def test_a_kernel_of_one_s_own_is_named_and_loads_once_trusted(tmp_path: Path) -> None:
    model, file = model_with(WiggledKernel(3.0, GammaPrior(2.0, 1.0))), tmp_path / "model.pt"
    model.save(file)
    name = f"{__name__}.WiggledKernel"
    with pytest.raises(ValueError, match=rf"names {name}.*trusted=\[WiggledKernel\]"):
        OSGPR.load(file)
    twin, T = OSGPR.load(file, trusted=[WiggledKernel]), torch.rand(5, 2).double()
    assert twin.covar_module.frequency == 3.0
    assert torch.equal(model.posterior(T).mean, twin.posterior(T).mean)
    assert torch.equal(model.posterior(T).variance, twin.posterior(T).variance)
    with pytest.raises(ValueError, match="not trusted"):  # trusted for that file only
        OSGPR.load(file)


def test_what_the_user_trusts_everywhere_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    model_with(WiggledKernel(3.0)).save(file)
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([WiggledKernel]):
        OSGPR.load(file)
        OSGPR.load(file, trusted=[WiggledKernel])
        assert WiggledKernel in torch.serialization.get_safe_globals()
    assert set(torch.serialization.get_safe_globals()) == before


PARTS: dict[str, Callable[[], Any]] = {
    "periodic": PeriodicKernel,
    "rational quadratic": RQKernel,
    "cosine": CosineKernel,
    "piecewise polynomial": PiecewisePolynomialKernel,
    "hamming": lambda: HammingIMQKernel(5),
    "sums and products": lambda: RBFKernel() * RQKernel() + RBFKernel(),
    "an interval": lambda: RBFKernel(lengthscale_constraint=Interval(0.1, 2.0)),
    "priors": lambda: ScaleKernel(
        RBFKernel(lengthscale_prior=SmoothedBoxPrior(0.1, 3.0)),
        outputscale_prior=HalfCauchyPrior(3.0),
    ),
    "Student-t": StudentTLikelihood,
    "beta": BetaLikelihood,
    "fixed noise and more": lambda: FixedNoiseGaussianLikelihood(
        torch.rand(3), learn_additional_noise=True
    ),
    "means": lambda: torch.nn.ModuleList([ZeroMean(), LinearMean(2)]),
    "a net": lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()),
    "warp": lambda: inputs.Warp(2, [0]),
    "chained": lambda: inputs.ChainedInputTransform(
        a=inputs.Normalize(2), b=inputs.Round([0]), c=inputs.FilterFeatures(torch.tensor([0]))
    ),
    "one-hot to numeric": lambda: inputs.OneHotToNumeric(3, {0: 2}),
    "categories": lambda: inputs.NumericToCategoricalEncoding(
        3, {2: 3}, {2: functools.partial(torch.nn.functional.one_hot, num_classes=3)}
    ),
    "perturbations": lambda: inputs.InputPerturbation(torch.rand(2, 2)),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_gpytorch_and_botorch_are_trusted(tmp_path: Path, part: str) -> None:
    whole = PARTS[part]()
    torch.save(whole, tmp_path / "part.pt")
    twin = read_pickle(tmp_path / "part.pt", None)
    assert type(twin) is type(whole)
    pairs = zip(whole.state_dict().items(), twin.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "text", "a plain pickle"])
def test_damaged_files_are_one_line(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "model.pt"
    model_with(RBFKernel()).save(file)
    whole = file.read_bytes()
    content = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "zeros": bytes(4096),
        "text": b"?",
        "a plain pickle": pickle.dumps(Calls(os.getpid)),
    }
    file.write_bytes(content[damage])
    with pytest.raises(ValueError, match=r"model\.pt is damaged or no model file") as error:
        OSGPR.load(file)
    assert "\n" not in str(error.value)


def test_a_file_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a dict, expected a WISKI"):
        WISKI.load(planted(tmp_path / "model.pt", {}))
