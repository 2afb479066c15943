"""What a public project has beside its code says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.repository.test_papers import PAPERS, bibliography, plain
from tests.support.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}


def commands(workflow: str) -> list[str]:
    """All commands of a workflow's jobs."""
    jobs = WORKFLOWS[workflow]["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_the_citation_is_of_this_version_and_licence() -> None:
    assert CITATION["version"] == PROJECT["version"]
    assert CITATION["license"] == PROJECT["license"]
    assert [author["name"] for author in CITATION["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_the_citation_has_the_five_papers_as_the_bibliography_has_them() -> None:
    works = {fields["eprint"]: fields for _, fields in bibliography() if "eprint" in fields}
    for reference in CITATION["references"]:
        (identifier,) = reference["identifiers"]
        work = works[identifier["value"].removeprefix("arXiv:")]
        assert reference["title"] == re.sub("[{}]", "", work["title"])
        assert str(reference["year"]) == work["year"]
        names = [f"{a['family-names']}, {a['given-names']}" for a in reference["authors"]]
        assert plain(" and ".join(names)) == plain(re.sub("[{}]", "", work["author"]))
    cited = {reference["identifiers"][0]["value"] for reference in CITATION["references"]}
    pages = " ".join(page.read_text(encoding="utf-8") for page in PAPERS)
    assert cited == {f"arXiv:{number}" for number in re.findall(r"arxiv\.org/abs/([\d.]+)", pages)}
    assert len(cited) == len(PAPERS) == 5


def test_workflows_run_what_ci_runs() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    of_ci = [line.replace("$test", "pytest") for line in re.findall(r'^step "(.*)"$', text, re.M)]
    run = [command for name in WORKFLOWS for command in commands(name)]
    left = {line for line in of_ci if line not in run and not line.startswith(("$", "browser"))}
    assert left == {".ci/wheel $environment/dist"}
    assert "sphinx-build -W --keep-going -q -c docs . site" in run  # in CI by test_site
    assert "bash .ci/wheel dist" in commands("wheels")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install, _, test = (
        readme.partition("<!-- ci: test -->\n```sh\n")[2].split("\n")[0].partition(" && ")
    )
    assert install in run
    assert test in run


def test_workflows_test_every_python_that_the_package_names() -> None:
    versions = WORKFLOWS["test"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert named
    assert set(named) <= set(versions)
    assert f">={versions[0]}" == PROJECT["requires-python"]


def test_importing_warns_of_nothing(tmp_path: Path) -> None:
    asked = [sys.executable, "-W", "error", "-c", "import bo_stream"]
    subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True)
