"""What `assay plan --profile` and `assay choose` share: plans joined with rooflines, rows of speed with verdicts."""
