"""Files: written whole or not at all, described by a header, free of code."""
