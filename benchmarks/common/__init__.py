"""What every benchmark uses: timing, claims, real data, results that are resumed."""
