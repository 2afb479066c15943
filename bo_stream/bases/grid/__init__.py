"""Product kernels interpolated on a grid: mesh, kernel, statistics, and the features of both."""
