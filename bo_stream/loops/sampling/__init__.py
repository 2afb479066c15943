"""Active sampling with a model, by ``ask`` and ``tell``, and replays of it on known maps."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.loops.sampling.sampling import ActiveSampling
    from bo_stream.loops.sampling.settings import SamplingSettings

__all__ = ["ActiveSampling", "SamplingSettings"]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__, {"sampling": ("ActiveSampling",), "settings": ("SamplingSettings",)}
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
