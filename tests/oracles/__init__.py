"""Dense formulas written naively from the papers; they share no code with the package.

Everything is differentiable, costs what it costs, and takes leading batch dimensions. Targets are
``... x n`` and noise is ``... x n``; kernels are gpytorch's modules, read by closed formulas.
"""
