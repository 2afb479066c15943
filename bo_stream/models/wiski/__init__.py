"""WISKI (Stanton et al., 2021): regression, learned noise, and classification on a grid."""
