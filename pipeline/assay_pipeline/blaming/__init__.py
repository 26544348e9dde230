"""`assay blame`: which part of a candidate lost what it lost."""
