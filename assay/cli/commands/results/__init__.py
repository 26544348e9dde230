"""Commands that read a run's records, and start nothing: gate, report, card."""
