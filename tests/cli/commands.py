"""What the tests of both commands assert."""

from __future__ import annotations

from typer.testing import Result


def assert_one_clear_error(result: Result, message: str) -> None:
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert isinstance(result.exception, SystemExit)
