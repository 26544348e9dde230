"""Faults planted in a running vLLM server, at known rates: what the probes, the levers and `diagnose locate` are tested on.

`worker.py` runs inside vLLM's workers (`--worker-extension-cls faults.worker.FaultyWorker`, this folder's parent on
PYTHONPATH); `planting.py` is the other end: it plants a fault over HTTP and takes it out again, so that one server serves all.
"""
