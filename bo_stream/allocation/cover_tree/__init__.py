"""The cover tree of Terenin et al. (2024): centres kept apart that cover all inputs."""
