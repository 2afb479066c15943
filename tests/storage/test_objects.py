"""Models in files: what they hold, what they say of themselves, and which are refused."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from safetensors.torch import load_file

from bo_stream import OSGPR, WISKI, __version__, describe_file
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import (
    MODEL_FILE,
    FileFormat,
    archive_bytes,
    read_archive,
    write_index,
)
from bo_stream.storage.objects import read_model, write_model
from tests.support.problems import observations


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


def model_with(kernel: Kernel) -> OSGPR:
    return OSGPR(*observations(12).astuple(), covar_module=kernel).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model's file, which is written once."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    model_with(RBFKernel()).save(path)
    return path.read_bytes()


@pytest.fixture
def file(saved: bytes, tmp_path: Path) -> Path:
    """A file of it for each test."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(saved)
    return path


def refusal(file: Path, kind: type[StreamingGP] = OSGPR, **options: Any) -> str:
    """The one line in which a file is refused."""
    with pytest.raises(ValueError, match=re.escape(str(file))) as error:
        kind.load(file, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewritten(file: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The file with an edited tree of objects, and a digest that fits."""
    about, arrays = read_archive(file)
    document = json.loads(arrays["objects.json"].numpy().tobytes())
    edit(document)
    content = json.dumps(document).encode()
    arrays["objects.json"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rest = {name: v for name, v in about.items() if name not in (*MODEL_FILE.head(), "sha256")}
    file.write_bytes(archive_bytes(rest, arrays))
    return file


def planted(node: Any, **names: str) -> Callable[[dict[str, Any]], None]:
    """An edit that adds a node to the model's attributes."""

    def edit(document: dict[str, Any]) -> None:
        document["names"] |= names
        document["model"]["state"]["planted"] = node

    return edit


# --- what a file says of itself ------------------------------------------------------------------


def test_a_file_says_what_it_holds_before_anything_is_built(file: Path) -> None:
    about = describe_file(file)
    digest = about.pop("sha256")
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert about == {
        "format": "bo_stream model",
        "version": 1,
        "bo_stream": __version__,
        "class": "OSGPR",
        "dtype": "float64",
        "observations": 12,
        "outputs": 1,
        "dimensions": 2,
    }


def test_the_header_is_read_without_torch(file: Path) -> None:
    program = (
        "import sys; from bo_stream.storage.archive import describe_file; "
        f"print(describe_file({str(file)!r})['class'], 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert told.stdout.split() == [b"OSGPR", b"False"]


def test_the_file_is_one_of_safetensors(file: Path) -> None:
    """Arrays under the names of a ``state_dict``."""
    stored, state = load_file(file), OSGPR.load(file).state_dict()
    for name in state:
        assert torch.equal(stored[name], state[name])


# --- files that are refused ----------------------------------------------------------------------


def test_a_model_of_another_class(file: Path) -> None:
    assert "holds a OSGPR, expected a WISKI" in refusal(file, WISKI)


def test_a_header_that_says_another_class(file: Path) -> None:
    """What is built is looked at, too."""
    about, arrays = read_archive(file)
    file.write_bytes(archive_bytes({"class": "WISKI", "dtype": about["dtype"]}, arrays))
    assert "holds a OSGPR, expected a WISKI" in refusal(file, WISKI)


def test_a_file_of_a_newer_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about, arrays = read_archive(file)
    newer = FileFormat("bo_stream model", 2)
    monkeypatch.setattr("bo_stream.storage.archive.package_version", lambda _: "9.9.9")
    file.write_bytes(archive_bytes({"class": about["class"]}, arrays, newer))
    monkeypatch.undo()
    assert describe_file(file)["version"] == 2
    assert re.search(
        r"was written by bo_stream 9\.9\.9 \(version 2 of the format\); this is .* \(version 1\)",
        refusal(file),
    )


def test_a_file_of_another_format(file: Path) -> None:
    other = FileFormat("bo_stream something", 1)
    file.write_bytes(archive_bytes({}, {}, other))
    assert "holds a bo_stream something, expected a bo_stream model" in refusal(file)
    write_index(file, other, {})
    assert "damaged, cut short or no model file" in refusal(file)
    assert describe_file(file)["format"] == "bo_stream something"


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "it is empty"),
    "cut": (lambda whole: whole[: len(whole) // 2], "cut short.*file not fully covered"),
    "one byte short": (lambda whole: whole[:-1], "file not fully covered"),
    "one byte more": (lambda whole: whole + b"0", "file not fully covered"),
    "cut in its header": (lambda whole: whole[:100], "cut short"),
    "zeros": (lambda whole: bytes(4096), "begins with zeros"),
    "zeros in the middle": (
        lambda whole: whole[: len(whole) // 2] + bytes(64) + whole[len(whole) // 2 + 64 :],
        "damaged",
    ),
    "text": (lambda whole: b"?", "expected the header"),
    "a long text": (lambda whole: b"What is this?" * 99, "expected the header"),
    "another program's safetensors": (
        lambda whole: (16).to_bytes(8, "little") + b'{"a": 1}'.ljust(16),
        "damaged, cut short or no model file",
    ),
    "nothing but brackets": (
        lambda whole: (80_000).to_bytes(8, "little") + b'{"a":' * 16_000,
        "damaged, cut short or no model file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_one_line(file: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    file.write_bytes(change(file.read_bytes()))
    assert re.search(message, refusal(file))


def test_every_flipped_bit_is_noticed(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(whole), (150,), generator=generator).tolist()
    for place in (*range(0, 64, 3), *places):
        whole[place] ^= 1 << place % 8
        file.write_bytes(whole)
        assert refusal(file)
        whole[place] ^= 1 << place % 8


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("writer", ["pickle", "torch.save"])
def test_a_pickle_is_not_run(tmp_path: Path, writer: str) -> None:
    mark, file = tmp_path / "mark", tmp_path / "model.pt"
    gadget = {"class": "OSGPR", "model": Calls(os.system, f"touch {mark}")}
    if writer == "pickle":
        file.write_bytes(pickle.dumps(gadget))
    else:
        torch.save(gadget, file)
    assert re.search("is a pickle|is a zip archive", refusal(file))
    assert not mark.exists()
    torch.load(file, weights_only=False) if writer == "torch.save" else pickle.loads(
        file.read_bytes()
    )
    assert mark.exists()  # where nothing stops it


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "builtins.eval",
        "builtins.open",
        "subprocess.Popen",
        "antigravity.fly",
        "torch.load",
        "torch.hub.load",
        "functools.partial",
        "bo_stream.storage.objects.Path",
        "bo_stream.storage.objects.read_model",
        "bo_stream.storage.archive.atomic_write",
        "bo_stream.models.no_such_module.Thing",
        "bo_stream.modelsevil.Thing",
        "torch.distributions.normal.torch",
        "gpytorch.utils.transforms.inv_softplus.__globals__",
    ],
)
def test_of_trusted_packages_only_classes_defined_there_are(file: Path, name: str) -> None:
    loaded = {*sys.modules}
    for node in ({"function": "it"}, {"object": "it", "state": {}}, {"type": "it"}, None):
        rewritten(file, planted(node, it=name))
        assert re.search(f"names {name}.*not trusted", refusal(file))
    assert "antigravity" not in {*sys.modules} - loaded


def test_a_call_of_what_is_trusted_is_not_made(file: Path, tmp_path: Path) -> None:
    """A partial function is built of what is trusted, and is not called."""
    mark = tmp_path / "mark"
    node = {"partial": {"function": "it"}, "args": [f"touch {mark}"], "keywords": {}}
    rewritten(file, planted(node, it="os.system"))
    assert "names os.system" in refusal(file)
    assert not mark.exists()


KERNEL = "gpytorch.kernels.rbf_kernel.RBFKernel"
WHOLE = "bo_stream.models.wiski.wiski.WISKI"
MARKED = {"object": "it", "state": {}}


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ({"method": "__class__", "of": MARKED}, KERNEL),
        ({"method": "load_state_dict", "of": MARKED}, KERNEL),
        ({"method": "__init_subclass__", "of": {"type": "it"}}, KERNEL),
        ({"static": "load", "of": "it"}, WHOLE),
        ({"method": "load", "of": {"object": "it", "state": {}}}, WHOLE),
        ({"method": "save", "of": {"object": "it", "state": {}}}, WHOLE),
    ],
)
def test_only_methods_that_modules_keep_are_read(file: Path, node: Any, name: str) -> None:
    rewritten(file, planted(node, it=name))
    assert re.search(f"asks for '{node.get('method', node.get('static'))}'", refusal(file))


@pytest.mark.parametrize(
    "node",
    [
        {"no such": 1},
        {},
        [1, 2],
        {"same": "nothing"},
        {"function": "it"},
        {"function": "nothing"},
        {"object": "it"},
        {"object": "it", "state": []},
        {"tensor": "nothing"},
        {"tensor": "covar_module.raw_lengthscale", "view": [[10**9], [1], 0]},
        {"tensor": "covar_module.raw_lengthscale", "view": [[1], [1], 10**9]},
        {"tensor": "covar_module.raw_lengthscale", "view": [[2], [-1], 1]},
        {"tensor": "covar_module.raw_lengthscale", "view": [[1], [1, 1], 0]},
        {"dtype": "load"},
        {"float": "os"},
        {"partial": 3, "args": [], "keywords": {}},
    ],
)
def test_trees_that_make_no_sense(file: Path, node: Any) -> None:
    rewritten(file, planted(node, it=KERNEL))
    assert "cannot be built by this version" in refusal(file)


def test_an_object_that_lacks_a_field(file: Path) -> None:
    """As of a version whose classes had other fields."""

    def edit(document: dict[str, Any]) -> None:
        def search(node: Any) -> None:
            if isinstance(node, dict) and node.get("object") == "InducingBasis":
                node["state"].pop("Z")
            for each in node.values() if isinstance(node, dict) else node:
                if isinstance(each, dict | list):
                    search(each)

        search(document["model"])

    assert re.search("its InducingBasis has no Z", refusal(rewritten(file, edit)))


def test_a_deep_tree(file: Path) -> None:
    """Deeper than Python's stack: refused like any other."""
    node: Any = None
    for _ in range(150):
        node = {"list": [node]}
    OSGPR.load(rewritten(file, planted(node)))
    about, arrays = read_archive(file)
    content = b'{"names":{},"model":' + b'{"list":[' * 20_000 + b"]}" * 20_000 + b"}"
    arrays["objects.json"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    file.write_bytes(archive_bytes({"class": about["class"]}, arrays))
    assert "cannot be built" in refusal(file)


def test_a_model_that_a_file_cannot_hold(tmp_path: Path) -> None:
    for thing in (lambda x: x, threading.Lock(), torch.rand(2, 2).to_sparse(), (i for i in "")):
        model = model_with(RBFKernel())
        model.covar_module.thing = [thing]
        with pytest.raises(ValueError, match=r"got at covar_module\.thing\.0 a \w+") as error:
            model.save(tmp_path / "model.safetensors")
        assert "\n" not in str(error.value)
        assert not [*tmp_path.iterdir()]


MISSING = f"cuda:{torch.cuda.device_count()}"
"""A device that this machine lacks."""


@pytest.mark.parametrize("device", [MISSING, torch.device(MISSING), "nowhere"])
def test_a_device_is_looked_for_before_the_file(tmp_path: Path, device: str | torch.device) -> None:
    expected = f"map_location to be a device of this machine, such as 'cpu', got '{device}'"
    with pytest.raises(ValueError, match=expected):
        OSGPR.load(tmp_path / "none", map_location=device)


def test_a_file_of_a_device_that_is_not_there(file: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        kernel = document["model"]["state"]["_modules"]["dict"]["covar_module"]
        kernel["state"]["_parameters"]["dict"]["raw_lengthscale"]["device"] = MISSING

    rewritten(file, edit)
    assert re.search(f"was on {MISSING}.* lacks: load it with map_location='cpu'", refusal(file))
    assert OSGPR.load(file, map_location="cpu").covar_module.raw_lengthscale.is_cpu


@pytest.mark.parametrize("trusted", [WiggledKernel, None, ["WiggledKernel"], "WiggledKernel"])
def test_what_is_trusted_is_a_list_of_classes_and_functions(tmp_path: Path, trusted: Any) -> None:
    with pytest.raises(ValueError, match=r"trusted to be a list .*, such as \[MyKernel\], got"):
        OSGPR.load(tmp_path / "none", trusted=trusted)


# --- what is trusted ----------------------------------------------------------------------------


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
    write_model(tmp_path / "part.safetensors", whole, {})
    twin = read_model(tmp_path / "part.safetensors", type(whole), None)
    pairs = zip(whole.state_dict().items(), twin.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert vars(whole).keys() == vars(twin).keys()
    for (_, a), (_, b) in zip(whole.named_parameters(), twin.named_parameters(), strict=True):
        assert a.requires_grad == b.requires_grad


class Anything(torch.nn.Module):
    """A module that holds whatever it is given."""

    def __init__(self, **things: Any) -> None:
        super().__init__()
        for name, thing in things.items():
            setattr(self, name, thing)


def again(file: Path, **things: Any) -> Any:
    write_model(file, Anything(**things), {})
    return read_model(file, Anything, None, [Anything])


def test_plain_values_stay_what_they_are(tmp_path: Path) -> None:
    things = {
        "numbers": [1, -0.0, 1e-320, 10**30, True, None, math.inf, -math.inf],
        "nested": {"a": (1, [2, {"b": {3}}]), 5: frozenset("x"), (1, 2): OrderedDict(z=1, a=2)},
        "slices": [slice(None), slice(1, 5, 2), slice(None, "b")],
        "torch": [torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.Size([])],
        "classes": [RBFKernel, torch.exp, functools.partial(torch.log, torch.ones(()))],
        "texts": ["", 'é\n"', "\u2028"],
        "object": {"object": "RBFKernel", "state": 3},
    }
    twin = again(tmp_path / "file", **things)
    for name in ("numbers", "nested", "slices", "torch", "texts", "object"):
        assert getattr(twin, name) == things[name]
        assert str(getattr(twin, name)) == str(things[name])
    assert twin.classes[:2] == things["classes"][:2]
    assert twin.classes[2]() == 0.0
    assert math.isnan(again(tmp_path / "file", nan=math.nan).nan)


def test_numpy_s_numbers_stay_numpy_s(tmp_path: Path) -> None:
    array, number = np.arange(6.0).reshape(2, 3).T, np.float32(1.5)
    none, one = np.zeros((0, 2)), np.array(3.0)
    twin = again(tmp_path / "file", array=array, number=number, empty=none, one=one)
    assert type(twin.number) is np.float32
    assert twin.number == number
    assert np.array_equal(twin.array, array)
    assert twin.empty.shape == (0, 2)
    assert (twin.one.shape, float(twin.one)) == ((), 3.0)


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    inner = Anything(base=base)
    twin = again(
        tmp_path / "file",
        base=base,
        inner=inner,
        same_module=[inner, inner],
        views=[base.mT, base[1:, 2], base[0, 0].expand(5), base[:0], base.detach()],
        items=(items := [1]),
        same_items={"x": items},
        parameter=torch.nn.Parameter(torch.ones(2), requires_grad=False),
        wanted=torch.ones(2, requires_grad=True),
        expanded=torch.tensor(2.0).expand(1000, 1000),
    )
    assert twin.base is twin.inner.base
    assert twin.same_module[0] is twin.same_module[1] is twin.inner
    assert twin.items is twin.same_items["x"]
    twin.base.mul_(2.0)
    for view, before in zip(
        twin.views, [base.mT, base[1:, 2], base[0, 0].expand(5), base[:0], base], strict=True
    ):
        assert torch.equal(view, 2.0 * before)
        assert view.stride() == before.stride()
    assert isinstance(twin.parameter, torch.nn.Parameter)
    assert not twin.parameter.requires_grad
    assert twin.wanted.requires_grad
    assert twin.expanded.stride() == (0, 0)
    assert (tmp_path / "file").stat().st_size < 10_000


def test_an_object_that_holds_itself(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    twin = again(tmp_path / "file", circle=circle)
    assert twin.circle[0]["again"] is twin.circle


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    twin = again(
        tmp_path / "file",
        values=values,
        empty=values[:0].clone(),
        scalar=values[1],
        memory=values.view(torch.uint8),
    )
    assert twin.values.dtype == twin.empty.dtype == dtype
    assert torch.equal(twin.memory, values.view(torch.uint8))
    assert torch.equal(twin.values, values)
    assert twin.scalar.shape == ()
