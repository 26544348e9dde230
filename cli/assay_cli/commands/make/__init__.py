"""Commands that make checkpoints: plan, quantize, verify, calibrate."""
