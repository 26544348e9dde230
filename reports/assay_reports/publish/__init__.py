"""A checkpoint, its card, manifest and report, uploaded to the Hugging Face hub, and read back from there.

In: the records of a run, a checkpoint folder, the name of a repository. Out: one commit on the hub, and a `Publication`: what
was uploaded, what was refused, and whether the hub holds the same bytes. May import the records, `huggingface_hub`, and of
`assay_reports` the card, the report and what loads a run.
"""
