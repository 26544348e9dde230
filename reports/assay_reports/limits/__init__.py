"""What the records of a run do not show, by what it is about; `find_limits` has them in a reader's order."""
