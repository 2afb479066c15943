"""Local Gaussian processes (Nguyen-Tuong et al., 2009), the baseline of streaming papers."""
