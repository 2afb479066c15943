"""BoTorch models that keep a stream in fixed-size memory; one final class per paper."""
