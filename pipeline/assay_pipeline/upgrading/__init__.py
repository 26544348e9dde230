"""`assay upgrade-check`: which engines there are, and whether another one answers as well."""
