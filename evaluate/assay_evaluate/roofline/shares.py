"""Which share of a roofline real servers reach, and of drafted tokens a target accepts: ranges, from what was published."""

from __future__ import annotations

Range = tuple[float, float]
"""From the least to the most."""

WRITING_SHARE: Range = (0.10, 0.30)
"""Of the roofline. GLM-5.2 on eight H200, five drafted tokens of which 28 % are accepted, wrote 94 to 126 tokens a second alone
and 828 to 925 with 32 requests, as FP8, W4A16 and NVFP4: shares of 0.11 to 0.23
(https://huggingface.co/canada-quant/GLM-5.2-W4A16-MTP)."""
ACCEPTED_SHARE: Range = (0.28, 0.52)
"""Of drafted tokens. GLM-5.2: 28 % of them on random prompts, 46 to 52 % on natural text (the same card)."""
