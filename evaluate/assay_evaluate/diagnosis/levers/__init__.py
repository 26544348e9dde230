"""Which serving parameter a failure hangs on: settings are tried one by one, and the smallest failing set is written down.

In: an endpoint, or how to start a server with other settings. Out: a `LeverReport`, and a folder that reproduces the failure
with Python alone. May import `diagnosis.probes` and the rooms below diagnosis.
"""
