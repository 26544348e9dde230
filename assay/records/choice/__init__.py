"""Records about deploying: which precision fits a machine (`hardware.py`), which checkpoint to take (`record.py`)."""
