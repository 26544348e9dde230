"""The pipeline from Python, as a notebook would use it: plan, quantize, verify, then judge two servers by their URLs.

python examples/notebook.py CHECKPOINT REFERENCE_URL CANDIDATE_URL
"""

import sys
import tempfile
from pathlib import Path

from assay_pipeline import QuantizeOptions, evaluate, plan, prepare, quantize, verify

source, reference_url, candidate_url = sys.argv[1:]

layers = plan(source, "w4a16")
print(f"{len(layers.tensors)} tensors, {layers.bytes_in:,} -> {layers.bytes_out:,} bytes")

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "w4a16"
    (made,) = quantize(source, precision="w4a16", out=out, options=QuantizeOptions(say=print))
    print("verified" if verify(made.folder, Path(source)).passed else "damaged")

sides = prepare(reference=f"fp8={reference_url}", candidates=[f"w4a16={candidate_url}"], suite="first-look.yaml")
judged = evaluate(sides, say=print)
for label, status in judged.gates.overall.items():
    print(f"{label}: {status}; {judged.gates.reasons.get(label, '')}")
print(judged.run_dir / "report" / "index.html")
