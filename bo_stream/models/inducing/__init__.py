"""Streaming inducing points: O-SGPR and O-SVGP (Bui et al., 2017), with OIPS or not."""
