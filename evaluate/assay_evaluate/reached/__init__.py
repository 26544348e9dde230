"""Right answers that were reached and lost: of wrong replies, those whose working states the right answer.

In: the measurements of a run and its journal. Out: a `Reached` for every task and checkpoint. Nobody is asked anything. May
import `asking`, `client`, `statistics`.
"""
