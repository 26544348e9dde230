"""Which serving parameter causes a failure: settings are changed one at a time, then the smallest failing set is sought.

In: an endpoint, or how to start a server with other settings. Out: a `LeverReport`, and a folder that reproduces the failure
without assay. May import `diagnosis.probes`, `diagnosis.locate` and the rooms below diagnosis.
"""
