"""Commands that read a run's records, and start nothing: status, compare, gate, report, card."""
