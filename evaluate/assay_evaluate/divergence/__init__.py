"""Next-token divergence of a candidate from its reference; all in nats.

    positions    two sides' log-probabilities of one text -> values per position: the lower bound and the unbiased estimate
    same_scale   whether both sides' log-probabilities are of one base, temperature and position
    drift        values per position of many texts -> statistics, by span, confidence, domain, language and part
    summary      all texts of a measurement -> the Divergence record
    documents    texts the reference writes, and held-out texts; how both sides are asked to score them
    phase        the part of a suite's run that does it
    hidden_states, exact  the full-vocabulary KL from hidden states and the output matrix

In: a session with a served checkpoint, the reference's texts. Out: a `Divergence` record. May import tasks (questions to write
replies to), asking, client, serving and statistics.
"""

from assay_evaluate.divergence.positions import PositionDivergence, ScoredDocument, position_divergence, sampling_gap
from assay_evaluate.divergence.summary import summarize

__all__ = ["PositionDivergence", "ScoredDocument", "position_divergence", "sampling_gap", "summarize"]
