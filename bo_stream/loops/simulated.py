"""A simulated prevalence map: what the command samples when it is given no data."""

from __future__ import annotations

import numpy as np

from bo_stream.loops.datasets import Array, Dataset

_SIDE_KM = 1000.0
_PIXELS = 100
_WAVES = 400
_LENGTHSCALE = 0.11
_BASE_LOGIT = -1.1
_SPREAD = 0.85
_NUGGET = 0.12


def simulated_prevalence(seed: int = 2020) -> Dataset:
    """A smooth random prevalence in [0, 1] on the pixels of a made-up country, some 4,000 of them.

    The logit is a Gaussian process with a Matérn-5/2 kernel, drawn by random Fourier features, and
    a small independent part. The same for the same seed, in a fraction of a second.
    """
    generator = np.random.default_rng(seed)
    inside = _country(generator)
    sites = _pixel_centres()[inside]
    logit = _BASE_LOGIT + _SPREAD * _smooth_field(sites, generator)
    logit += _NUGGET * generator.standard_normal(len(sites))
    return Dataset(
        sites * _SIDE_KM,
        1.0 / (1.0 + np.exp(-logit)),
        ("easting (km)", "northing (km)"),
        "simulated prevalence (proportion)",
        "simulated prevalence map",
    )


def _pixel_centres() -> Array:
    ticks = (np.arange(_PIXELS) + 0.5) / _PIXELS
    north, east = np.meshgrid(ticks[::-1], ticks, indexing="ij")
    return np.stack((east.ravel(), north.ravel()), axis=-1)


def _country(generator: np.random.Generator) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Pixels within a border whose radius is a random periodic function of the angle."""
    offset = _pixel_centres() - 0.5
    angle = np.arctan2(offset[:, 1], offset[:, 0])
    waves = np.arange(2, 9)
    phase = generator.uniform(0.0, 2.0 * np.pi, waves.size)
    size = generator.uniform(0.5, 1.0, waves.size) * 0.08 / np.sqrt(waves)
    border = 0.36 + (size * np.cos(np.multiply.outer(angle, waves) + phase)).sum(-1)
    return np.hypot(offset[:, 0], offset[:, 1]) < border


def _smooth_field(sites: Array, generator: np.random.Generator) -> Array:
    """A Gaussian process of unit variance; Matérn-5/2's frequencies are Student's t (5 d.o.f.)."""
    directions = generator.standard_normal((2, _WAVES))
    stretch = np.sqrt(5.0 / generator.chisquare(5.0, _WAVES))
    phase = generator.uniform(0.0, 2.0 * np.pi, _WAVES)
    angles = sites @ (directions * stretch) / _LENGTHSCALE + phase
    field: Array = np.sqrt(2.0 / _WAVES) * np.cos(angles).sum(-1)
    return field
