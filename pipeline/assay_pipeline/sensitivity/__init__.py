"""What `assay sensitivity` was asked, and how it is measured: in transformers, one layer at a time, or served."""
